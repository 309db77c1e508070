/// The pauses between attempts: twice as long each time, up to a limit, each shortened by chance by up to a quarter, so
/// that many daemons do not come back at the same instant.
struct Backoff {
    private var next: Duration = first

    static let first: Duration = .milliseconds(250)
    static let longest: Duration = .seconds(5)

    /// The pause before the next attempt.
    mutating func pause() -> Duration {
        defer { next = min(next * 2, Self.longest) }
        return next * Double.random(in: 0.75...1)
    }

    mutating func reset() {
        next = Self.first
    }
}
