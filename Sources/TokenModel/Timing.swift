/// How long the daemon waits, pauses and is patient, where a test would have to wait as long. One value for the whole process, handed down
/// from `Daemon`.
///
/// The durations below are those of production. A debug build takes a fraction of them if the variable `TEST_TIMING` says so; a release build
/// ignores it. Pauses that no test waits for, and those between lines of the log, are where they are used. What a person may set is a setting.
/// What decides something about a token is not here.
public struct Timing: Sendable {
    /// 1 in production.
    let fraction: Double

    public static let production = Timing(fraction: 1)

    /// - Parameter fraction: Of the durations of production, such as 0.05.
    public init(fraction: Double) { self.fraction = fraction }

    private func of(_ duration: Duration) -> Duration { fraction == 1 ? duration : duration * fraction }

    // MARK: The connection

    /// How soon to look again at a schema that does not fit.
    public var unfitSchema: Duration { of(.seconds(3)) }
    /// The pause before a lost connection is made again. It doubles each time.
    public var reconnect: Backoff { Backoff(from: of(.milliseconds(250)), to: of(.seconds(5))) }

    /// The drain says in the log that PostgreSQL has not answered for this long. Its statements take milliseconds, and waits for locks end
    /// sooner.
    public var longSilence: Duration { of(.seconds(10)) }

    // MARK: Heartbeats

    /// Between two heartbeats of a daemon in the database.
    public var heartbeat: Duration { of(.seconds(5)) }

    /// How long a change may wait until it is looked for, or shown in `status`: the shortest time between two heartbeats, too.
    public var soon: Duration { of(.seconds(1)) }

    /// Between two looks for daemons that have ended, whose requests another daemon takes over.
    public var takeOver: Duration { of(.seconds(10)) }

    /// How long the same heartbeat of a daemon must be seen until it counts as silent, and how far apart two looks may be.
    public var silence: (duration: Duration, longestGap: Duration) { (of(.seconds(30)), of(.seconds(20))) }

    // MARK: Locks of others, and other problems

    /// Locks are met for this long before the first look at who holds them.
    public var lockPatience: Duration { of(.seconds(1)) }

    /// A transaction is reported after it has been seen with a lock for this long.
    public var lockSeen: Duration { of(.seconds(3)) }

    /// Between two looks at who holds locks: before and after something is reported.
    public var lockLooks: (before: Duration, after: Duration) { (of(.milliseconds(500)), of(.seconds(5))) }

    /// The problem is over when no lock has been met for this long. Not every pass reads the waiting results, and a wait for a lock takes
    /// `drain.lock_timeout`: both last half a second, whatever the fraction is.
    public var lockQuiet: Duration { max(of(.seconds(3)), .milliseconds(1500)) }

    /// Without any progress for this long, the wait is reported even if no session holds a lock for long. Always twice as long as
    /// `lockQuiet`: a wait that is over is no standstill.
    public var standstill: Duration { lockQuiet * 2 }

    /// Another problem of the drain is over when it has not occurred for this long. As with locks, not every pass meets it.
    public var problemLasts: Duration { max(of(.seconds(2)), .seconds(1)) }

    // MARK: Chores

    /// Between two looks for sweeps that SQL requests, and for what else the sweep's worker does. Polling works behind any pooler.
    public var chores: Duration { of(.seconds(2)) }

    /// Between two looks for waves of 410s: at least, and at most.
    public var waves: (shortest: Duration, longest: Duration) { (of(.seconds(10)), of(.seconds(30))) }

    /// Between two attempts to finish what `forget` has begun.
    public var erasures: Duration { of(.seconds(30)) }

    /// Between two looks at attached tables.
    public var attachments: Duration { of(.seconds(60)) }

    /// Between two refreshes of what `status` cannot compute within milliseconds.
    public var statusCache: Duration { of(.seconds(5)) }

    /// Between two looks at the database for the metrics and the status page: at least, and at most.
    public var monitoring: (shortest: Duration, longest: Duration) { (of(.seconds(5)), of(.seconds(60))) }

    /// Between two readings of the status page's history.
    public var history: Duration { of(.seconds(60)) }

    /// The second connection of a drain: the pause before it is tried again, and how long it is kept without a backlog.
    public var secondConnection: (retry: Duration, kept: Duration) { (of(.seconds(10)), of(.seconds(30))) }

    // MARK: Sending

    /// A failure to send is reported when no request of the credential has been answered for this long.
    public var unanswered: Duration { of(.seconds(10)) }

    /// Between two looks whether files of the credentials were replaced.
    public var credentials: Duration { of(.seconds(30)) }

    /// A pause that APNs asks for, and that a test would have to wait for.
    public func scaled(_ pause: Duration) -> Duration { of(pause) }

    /// A backoff whose pauses a test would have to wait for.
    public func scaled(_ backoff: Backoff) -> Backoff { Backoff(from: of(backoff.first), to: of(backoff.longest)) }

    /// How long until a claim is tried again: after an error of its data, and after a lock of another session or a lost connection.
    public var blockedClaim: (data: Duration, passing: Duration) { (of(.seconds(30)), of(.seconds(2))) }
}
