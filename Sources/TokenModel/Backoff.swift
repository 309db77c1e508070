/// Exponential backoff: the pause doubles with each failure, from `first` up to `longest`.
///
/// A pure value: it computes the pauses, and the caller waits.
public struct Backoff: Hashable, Sendable {
    /// The pause after the first failure.
    public let first: Duration
    /// The longest pause.
    public let longest: Duration
    /// How many pauses were taken since the last reset.
    private var taken = 0

    public init(from first: Duration, to longest: Duration) {
        self.first = first
        self.longest = longest
    }

    /// The pause before the next attempt. The pause after that one is twice as long.
    public mutating func next() -> Duration {
        defer { taken = min(taken + 1, Self.mostDoublings) }
        return pause(after: taken)
    }

    /// An attempt has succeeded: the next pause is `first` again.
    public mutating func reset() {
        taken = 0
    }

    /// The pause after one more failure, for callers that count failures themselves.
    ///
    /// - Parameter failures: The number of failures before this one; 0 yields `first`.
    public func pause(after failures: Int) -> Duration {
        min(first * (1 << min(max(failures, 0), Self.mostDoublings)), longest)
    }

    /// 2^30 times any pause in use is far beyond its limit, and far from an overflow.
    private static let mostDoublings = 30
}

extension Duration {
    /// This pause with up to 25 % jitter: many daemons that failed together do not come back at the same instant.
    ///
    /// - Parameter share: The part of the pause to keep, 0.75 to 1.
    public func jittered(keeping share: Double = .random(in: 0.75...1)) -> Duration { self * share }
}
