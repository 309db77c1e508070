internal import Synchronization

/// How long something took, counted by buckets. Any thread may record; one takes some 50 ns.
public final class DurationHistogram: Sendable {
    /// The upper bound of each bucket but the last, which has none. The same for everything that is measured, so that dashboards can
    /// compare: from a statement on a local socket to a timeout.
    public static let bounds: [Duration] = [
        .microseconds(500), .milliseconds(1), .microseconds(2500), .milliseconds(5), .milliseconds(10),
        .milliseconds(25), .milliseconds(50), .milliseconds(100), .milliseconds(250), .milliseconds(500), .seconds(1),
        .milliseconds(2500), .seconds(5), .seconds(10), .seconds(30),
    ]

    /// What was recorded up to a moment.
    public struct Counts: Sendable, Equatable {
        /// How many fell into each bucket of `bounds`, and above the last bound. Not cumulative.
        public var buckets = [Int](repeating: 0, count: DurationHistogram.bounds.count + 1)
        /// Of all durations together.
        public var sum = Duration.zero
    }

    private let state = Mutex(Counts())

    public init() {}

    /// Counts a duration.
    public func record(_ duration: Duration) {
        let bucket = Self.bounds.firstIndex { duration <= $0 } ?? Self.bounds.count
        state.withLock { counts in
            counts.buckets[bucket] += 1
            counts.sum += duration
        }
    }

    /// What was recorded so far.
    public var counts: Counts { state.withLock { $0 } }
}
