public import TokenModel

/// The right to sweep: one run at a time across all daemons, held by a heartbeat in its row of `sweep_run`.
///
/// A transaction lock cannot span a sweep's many short transactions, and a session lock fails behind a pooler.
public struct SweepLease: Sendable {
    let runID: Int64
    let trigger: SweepTrigger
    let dryRun: Bool
    let forced: Bool
    let holder: String

    /// A sweep that is silent for this long has lost its right.
    static let silence: Duration = .seconds(60)

    /// What there is to take up.
    public enum Claim: Sendable {
        /// A sweep on the timer, if none has been started within the interval, by whatever daemon.
        case due(interval: Duration)
        /// The oldest request, of whoever asked.
        case requested
        /// A new sweep, now.
        case new(SweepTrigger, dryRun: Bool, forced: Bool = false)
    }

    /// Takes up a sweep, unless there is nothing to take up or another one is running.
    public static func claim(
        _ claim: Claim, holder: String, on connection: inout Connection
    ) throws(DatabaseError) -> SweepLease? {
        try connection.transaction(Self.begin) { connection throws(DatabaseError) in
            try expire(on: &connection)
            if try connection.query("SELECT FROM tokenkeeper.sweep_run WHERE outcome = 'running'").count > 0 {
                return nil
            }
            let rows: Rows
            switch claim {
            case .due(let interval):
                guard try untilDue(interval: interval, on: &connection) <= .zero else { return nil }
                rows = try start(.timer, dryRun: false, forced: false, holder: holder, on: &connection)
            case .requested:
                rows = try connection.query(
                    """
                    UPDATE tokenkeeper.sweep_run
                    SET outcome = 'running', started_at = clock_timestamp(), heartbeat_at = clock_timestamp(), daemon_id = $1
                    WHERE run_id = (SELECT min(run_id) FROM tokenkeeper.sweep_run WHERE outcome = 'requested')
                    RETURNING run_id, trigger, dry_run, forced
                    """, [.text(holder)])
            case .new(let trigger, let dryRun, let forced):
                rows = try start(trigger, dryRun: dryRun, forced: forced, holder: holder, on: &connection)
            }
            guard rows.count == 1, let runID = rows.integer(0, 0) else { return nil }
            return SweepLease(
                runID: runID, trigger: rows.text(0, 1).flatMap(SweepTrigger.init(rawValue:)) ?? .sql,
                dryRun: rows.bool(0, 2) ?? false, forced: rows.bool(0, 3) ?? false, holder: holder)
        }
    }

    private static func start(
        _ trigger: SweepTrigger, dryRun: Bool, forced: Bool, holder: String, on connection: inout Connection
    ) throws(DatabaseError) -> Rows {
        try connection.query(
            """
            INSERT INTO tokenkeeper.sweep_run (trigger, dry_run, forced, outcome, started_at, heartbeat_at, daemon_id)
            VALUES ($1, $2, $3, 'running', clock_timestamp(), clock_timestamp(), $4)
            RETURNING run_id, trigger, dry_run, forced
            """, [.text(trigger.rawValue), .bool(dryRun), .bool(forced), .text(holder)])
    }

    /// How long until the timer's next sweep is due, zero or less when it is. The last one counts, whichever daemon ran it:
    /// a restart does not start the count anew. After a failure five minutes are enough, and one that is running may have died.
    public static func untilDue(interval: Duration, on connection: inout Connection) throws(DatabaseError) -> Duration {
        let rows = try connection.query(
            """
            SELECT (extract(epoch FROM max(CASE outcome
                       WHEN 'failed' THEN started_at + least($1 * interval '1 microsecond', interval '5 minutes')
                       WHEN 'running' THEN heartbeat_at + $2 * interval '1 microsecond'
                       ELSE started_at + $1 * interval '1 microsecond' END) - clock_timestamp()) * 1000)::bigint
            FROM tokenkeeper.sweep_run
            WHERE NOT dry_run AND outcome IN ('running', 'finished', 'failed')
              AND started_at > clock_timestamp() - $1 * interval '1 microsecond'
            """, [.int8(interval.microseconds), .int8(silence.microseconds + 1_000_000)])
        return .milliseconds(rows.integer(0, 0) ?? 0)
    }

    /// What a look at the log of sweeps shows.
    public struct Look: Sendable {
        /// Whether somebody has asked for a sweep.
        public var isRequested: Bool
        /// The last sweep that ended, whichever daemon ran it; dry runs do not count.
        public var last: (endedAt: Instant, outcome: String)?
    }

    /// Looks whether there is something to take up, cheaper than to claim it; and says of runs that fell silent that they did.
    public static func look(on connection: inout Connection) throws(DatabaseError) -> Look {
        let seen = try connection.query(
            """
            SELECT w.requested, w.silent, l.finished_at, l.outcome
            FROM (SELECT bool_or(outcome = 'requested') AS requested,
                         bool_or(outcome = 'running' AND heartbeat_at < clock_timestamp() - $1 * interval '1 microsecond') AS silent
                  FROM tokenkeeper.sweep_run WHERE outcome IN ('requested', 'running')) AS w
            LEFT JOIN (SELECT finished_at, outcome FROM tokenkeeper.sweep_run
                       WHERE outcome IN ('finished', 'failed', 'interrupted') AND NOT dry_run
                       ORDER BY run_id DESC LIMIT 1) AS l ON true
            """, [.int8(silence.microseconds)])
        if seen.bool(0, 1) == true {
            try connection.transaction(begin) { connection throws(DatabaseError) in try expire(on: &connection) }
        }
        var look = Look(isRequested: seen.bool(0, 0) == true)
        if let endedAt = seen.instant(0, 2), let outcome = seen.text(0, 3) { look.last = (endedAt, outcome) }
        return look
    }

    private static func expire(on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query(
            """
            UPDATE tokenkeeper.sweep_run
            SET outcome = 'interrupted', finished_at = clock_timestamp(),
                message = daemon_id || ' fell silent; ' || \(goesOn)
            WHERE outcome = 'running' AND heartbeat_at < clock_timestamp() - $1 * interval '1 microsecond'
            """, [.int8(silence.microseconds)])
    }

    /// Asks for a sweep, like `tokenkeeper.request_sweep`, and names the trigger.
    public static func request(_ trigger: SweepTrigger, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(begin) { connection throws(DatabaseError) in
            _ = try connection.query(
                "INSERT INTO tokenkeeper.sweep_run (trigger) VALUES ($1)", [.text(trigger.rawValue)])
        }
    }

    /// Says of runs that this holder has left behind, through a lost connection, that they were interrupted.
    public static func release(holder: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(begin) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_run
                SET outcome = 'interrupted', finished_at = clock_timestamp(),
                    message = 'the connection was lost; ' || \(goesOn)
                WHERE outcome = 'running' AND daemon_id = $1
                """, [.text(holder)])
        }
    }

    /// What becomes of what an interrupted sweep has left, in SQL.
    private static let goesOn =
        "CASE WHEN forced THEN 'ask for another one, with force' ELSE 'the next sweep goes on where this one stopped' END"

    /// One at a time through the decision whether to start.
    private static var begin: String {
        """
        \(BatchTransaction(lockTimeout: .seconds(5)).begin)
        \(DrainLock.sweepClaim);
        """
    }
}
