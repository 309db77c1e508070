public import TokenModel

/// Whether a daemon's old heartbeat means that the daemon is silent. Pure.
///
/// After a standstill of PostgreSQL or of the whole machine, and after a jump of the server's clock, all heartbeats are old. The first daemon
/// that goes on would take over the requests of all others, which are alive, and send them twice. So the same heartbeat must also have been
/// seen for half a minute, in looks that follow each other.
public struct SilenceWatch {
    private struct Seen {
        var heartbeat: Instant
        var since: ContinuousClock.Instant
        var last: ContinuousClock.Instant
    }

    private var seen: [String: Seen] = [:]

    /// How long the same heartbeat must be seen.
    private let duration: Duration
    /// Between two looks that are further apart, this daemon may have stood still itself.
    private let longestGap: Duration

    public init(_ timing: Timing) { (duration, longestGap) = timing.silence }

    /// Notes a heartbeat of another daemon.
    ///
    /// - Returns: Whether the same one has been seen for long enough.
    public mutating func note(
        _ daemonID: String, _ heartbeat: Instant, at now: ContinuousClock.Instant = .now
    ) -> Bool {
        seen = seen.filter { $0.value.last.duration(to: now) <= longestGap }
        var one = seen[daemonID] ?? Seen(heartbeat: heartbeat, since: now, last: now)
        if one.heartbeat != heartbeat { one = Seen(heartbeat: heartbeat, since: now, last: now) }
        one.last = now
        seen[daemonID] = one
        return one.since.duration(to: now) >= duration
    }
}
