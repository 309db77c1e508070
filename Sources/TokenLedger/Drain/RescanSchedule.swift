/// Where to look for rows behind the point up to which a partition was drained.
///
/// A row can be committed late. And a sender that queues little goes on filling the page it has begun, or one that has been emptied,
/// while others have long extended the partition: so this is not for the sake of completeness alone, but of freshness.
struct RescanSchedule {
    /// So many pages behind the point are looked at every time.
    static let near = 1024

    /// Pages that have been filled again, the latest last: who fills one goes on with it.
    private var filled: [Int] = []
    private static let most = 16

    /// Where the next look at all the others begins.
    private var page = 0
    /// How many pages it takes in.
    private var window = 4096
    private var again: ContinuousClock.Instant?
    private var under: (range: Range<Int>, since: ContinuousClock.Instant)?

    /// A look shall take a millisecond or two, and looks a tenth of the time at most.
    private static let wanted = Duration.milliseconds(1)...Duration.milliseconds(3)
    private static let share = 10

    /// The pages to look at now, those that are filled again first.
    ///
    /// - Parameter tried: First pages of the ranges that have had their turn just now: a row that cannot be had shall not keep the
    ///   others waiting.
    mutating func next(
        before point: Int, except tried: Set<Int> = [], now: ContinuousClock.Instant
    ) -> [Range<Int>] {
        let end = point - Self.near
        let known = filled.filter {
            $0 < end && !tried.contains($0 / Partition.pagesPerRange * Partition.pagesPerRange)
        }
        .map { $0..<$0 + 1 }
        under = nil
        guard end > 0, again.map({ now >= $0 }) ?? true else { return known }
        if page >= end { page = 0 }
        let range = page..<min(page + window, end)
        under = (range, now)
        return known + [range]
    }

    /// What the look has found: the next one begins behind it, so that a row that cannot be had is not found for ever.
    mutating func looked(foundAt found: Int?, now: ContinuousClock.Instant) {
        if let found { note(found, before: found + 1) }
        guard let (range, since) = under else { return }
        let took = since.duration(to: now)
        if let found, !range.contains(found) { return }
        page = found.map { ($0 / Partition.pagesPerRange + 1) * Partition.pagesPerRange } ?? range.upperBound
        if found == nil, range.count == window {
            if took < Self.wanted.lowerBound { window = min(window * 2, 1 << 16) }
            if took > Self.wanted.upperBound { window = max(window / 2, 256) }
        }
        again = now + took * Self.share
    }

    /// A row was found on a page; when that lies before the point, it is filled again.
    mutating func note(_ found: Int, before point: Int) {
        guard found < point else { return }
        filled.removeAll { $0 == found }
        filled.append(found)
        if filled.count > Self.most { filled.removeFirst() }
    }
}
