internal import Glibc

/// An instant in whole microseconds since 1970-01-01 00:00 UTC: PostgreSQL's resolution.
public struct Instant: Hashable, Comparable, Sendable {
    /// Microseconds since the Unix epoch, negative before it.
    public let microseconds: Int64

    public init(microseconds: Int64) {
        self.microseconds = microseconds
    }

    /// This machine's clock.
    public static var now: Instant {
        var time = timespec()
        _ = unsafe clock_gettime(CLOCK_REALTIME, &time)
        return Instant(microseconds: Int64(time.tv_sec) * 1_000_000 + Int64(time.tv_nsec) / 1000)
    }

    /// PostgreSQL's `infinity` and `-infinity`. No result and no registration may have them.
    public static let distantFuture = Instant(microseconds: .max)
    public static let distantPast = Instant(microseconds: .min)

    /// False for the two infinities.
    public var isFinite: Bool { self != .distantFuture && self != .distantPast }

    /// 2008-01-01 00:00 UTC. APNs did not exist before, so an earlier timestamp is a mistake.
    public static let beforeAPNs = Instant(microseconds: 1_199_145_600_000_000)

    /// This instant moved by a duration; an overflow yields an infinity.
    public func advanced(byMicroseconds step: Int64) -> Instant {
        let (sum, overflow) = microseconds.addingReportingOverflow(step)
        return overflow ? (step > 0 ? .distantFuture : .distantPast) : Instant(microseconds: sum)
    }

    public static func < (left: Instant, right: Instant) -> Bool {
        left.microseconds < right.microseconds
    }
}
