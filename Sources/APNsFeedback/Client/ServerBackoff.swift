/// When a server that could not be reached is tried again: after 250 ms, then after twice as long each time, up to a minute,
/// each pause shortened by chance by up to a quarter, so that many clients do not come back at the same instant.
struct ServerBackoff {
    private var next: Duration = first
    private var until: ContinuousClock.Instant?

    static let first: Duration = .milliseconds(250)
    static let longest: Duration = .seconds(60)

    /// What is left of the pause; nil when there is none.
    func remaining(at now: ContinuousClock.Instant) -> Duration? {
        guard let until, until > now else { return nil }
        return now.duration(to: until)
    }

    /// Begins a pause, unless one is under way: attempts that began together fail together, and count once.
    ///
    /// - Parameter share: Of the pause, 0.75 to 1.
    mutating func failed(at now: ContinuousClock.Instant, share: Double = .random(in: 0.75...1)) {
        guard remaining(at: now) == nil else { return }
        until = now + next * share
        next = min(next * 2, Self.longest)
    }

    /// The server has answered something.
    mutating func answered() {
        guard until != nil else { return }
        self = ServerBackoff()
    }
}
