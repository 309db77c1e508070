internal import TokenModel

/// When a server that could not be reached is tried again: after 250 ms, then with exponential backoff up to a minute, each time with
/// up to 25 % jitter.
struct ServerBackoff {
    private var backoff = Backoff(from: .milliseconds(250), to: .seconds(60))
    private var until: ContinuousClock.Instant?

    /// What is left of the pause; nil when there is none.
    func remaining(at now: ContinuousClock.Instant) -> Duration? {
        guard let until, until > now else { return nil }
        return now.duration(to: until)
    }

    /// Begins a pause, unless one is running: attempts that began together fail together, and count once.
    ///
    /// - Parameter share: The part of the pause that the jitter keeps, 0.75 to 1.
    mutating func failed(at now: ContinuousClock.Instant, share: Double = .random(in: 0.75...1)) {
        guard remaining(at: now) == nil else { return }
        until = now + backoff.next().jittered(keeping: share)
    }

    /// The server has responded: the next pause is the first again.
    mutating func answered() {
        until = nil
        backoff.reset()
    }
}
