/// What a drain remembers of a partition between its turns.
///
/// The cursor says where to look first. It never says what is there: a row can be committed late, before the cursor, and PostgreSQL
/// reuses space on earlier pages. The rescan finds such rows.
struct PartitionCursor {
    /// Every page before this one has been seen drained.
    var page = 0
    /// Whether a sealed partition holds mostly 200s, so that a bulk read pays off. Nil until its first rows have been sampled.
    var isMostlyAccepted: Bool?
    var rescan = RescanSchedule()
    /// First pages of the ranges whose rows another session had locked in this pass.
    ///
    /// Each attempt costs two lock timeouts, more than a whole turn: without this set, a partition would spend every turn on the same
    /// range. The next pass tries these ranges again.
    var blocked: Set<Int> = []
    /// First pages of the ranges that PostgreSQL has refused, and refused to set aside, since the end of the partition was last reached.
    ///
    /// On a slow machine an attempt takes longer than a whole turn: the rows behind them come first.
    var refused: Set<Int> = []
    /// First pages of the ranges that are left for later.
    var waiting: Set<Int> { blocked.union(refused) }

    /// Forgets what holds for one pass only. Forgets everything if the partition has shrunk, because it has been truncated since.
    mutating func beginPass(pages: Int) {
        if page >= pages { restart() }
        blocked = []
    }

    /// Starts at the front again, after the partition was truncated.
    mutating func restart() {
        page = 0
        isMostlyAccepted = nil
        rescan = RescanSchedule()
        refused = []
    }
}
