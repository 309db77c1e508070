/// How long a thread with many requests under way lets answers gather before it looks for them.
///
/// libcurl 7.88 asks each of its transfers, with a system call, whether something came for it, whenever it looks at all: with
/// 500 under way and answers coming singly that is 500 calls an answer. So it looks at most twenty times within the time that
/// an answer takes: what comes in between comes at the most a twentieth later, and an answer costs at the most twenty calls.
struct PollPace {
    /// Smoothed; nil before the first answer.
    private var usual: Duration?

    /// With fewer under way there is nothing to be saved.
    static let fewest = 16
    /// What a request that is submitted meanwhile may have to wait.
    static let longest: Duration = .milliseconds(20)
    static let share = 20

    /// Takes note of how long an answer took.
    mutating func answered(after time: Duration) {
        usual = usual.map { $0 + (time - $0) / 16 } ?? time
    }

    /// The least time between one look and the next.
    func interval(underWay: Int) -> Duration {
        guard underWay >= Self.fewest, let usual else { return .zero }
        return min(usual / Self.share, Self.longest)
    }
}
