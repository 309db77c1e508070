/// How long a thread with many requests in flight lets responses gather before it polls.
///
/// With each poll, libcurl 7.88 makes a system call for each of its transfers: with 500 in flight and single responses, that is 500
/// calls per response. So the thread polls at most twenty times within the usual response time. A response is then late by at
/// most a twentieth of that time, and costs at most twenty calls.
struct PollPace {
    /// The smoothed response time; nil before the first response.
    private var usual: Duration?

    /// With fewer requests in flight there is nothing to save.
    static let fewest = 16
    /// The longest delay for a request that is submitted in between.
    static let longest: Duration = .milliseconds(20)
    static let share = 20

    /// Records the time that a response took.
    mutating func answered(after time: Duration) {
        usual = usual.map { $0 + (time - $0) / 16 } ?? time
    }

    /// The shortest time between two polls.
    func interval(underWay: Int) -> Duration {
        guard underWay >= Self.fewest, let usual else { return .zero }
        return min(usual / Self.share, Self.longest)
    }
}
