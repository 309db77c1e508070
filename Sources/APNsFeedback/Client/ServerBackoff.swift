internal import TokenModel

/// When another connection to a server may be tried. Connections are numbered in the order of their attempts.
///
/// - An attempt that fails begins a pause: 250 ms, then with exponential backoff up to 15 seconds, each time with up to 25 % jitter.
///   Connections that are lost or refuse requests before they answer begin one from the third in a row.
/// - Only an answer on a connection that is not older than the last failed one ends the pause. While a server restarts, connections
///   to its old process still answer.
/// - A connection that has answered and takes no more requests earns one attempt that does not wait. So a server that closes its
///   connections after a few requests is used at full speed, and one that refuses all connections gets no more attempts at once than
///   it had connections.
struct ServerBackoff {
    /// After so many lost or refusing connections in a row, a pause begins.
    static let mostFruitless = 3

    private var backoff = Backoff(from: .milliseconds(250), to: .seconds(15))
    private var until: ContinuousClock.Instant?
    /// The connection that failed last.
    private var lastFailed = 0
    private var fruitless = 0
    /// Attempts that need not wait.
    private var earned = 0

    /// What is left of the pause; nil if a connection may be tried now.
    func remaining(at now: ContinuousClock.Instant) -> Duration? {
        guard earned == 0, let until, until > now else { return nil }
        return now.duration(to: until)
    }

    /// An attempt begins.
    mutating func begin() {
        earned = max(0, earned - 1)
    }

    /// No connection could be made. Begins a pause, unless one is running: attempts that began together fail together, and count once.
    ///
    /// - Parameter share: The part of the pause that the jitter keeps, 0.75 to 1.
    mutating func failed(_ number: Int, at now: ContinuousClock.Instant, share: Double = .random(in: 0.75...1)) {
        lastFailed = max(lastFailed, number)
        if let until, until > now { return }
        until = now + backoff.next().jittered(keeping: share)
    }

    /// A connection was lost before it answered, or refuses requests. A few times another connection may help.
    mutating func wasFruitless(_ number: Int, at now: ContinuousClock.Instant) {
        lastFailed = max(lastFailed, number)
        fruitless += 1
        if fruitless >= Self.mostFruitless { failed(number, at: now) }
    }

    /// A connection has answered.
    mutating func answered(_ number: Int) {
        guard number >= lastFailed else { return }
        until = nil
        fruitless = 0
        backoff.reset()
    }

    /// A connection that has answered takes no more requests.
    ///
    /// - Parameter most: As many connections as the server may have.
    mutating func earn(atMost most: Int) {
        earned = min(most, earned + 1)
    }

    /// The server takes no requests on any connection: begins a pause, whatever its connections have earned.
    mutating func rest(at now: ContinuousClock.Instant) {
        earned = 0
        failed(lastFailed, at: now)
    }
}
