public import TokenModel

/// The right to sweep: one run at a time across all daemons, held by a heartbeat in its row of `sweep_run`.
///
/// A transaction lock cannot span the many short transactions of a sweep, and a session lock fails behind a pooler.
public struct SweepLease: Sendable {
    let runID: Int64
    let trigger: SweepTrigger
    let dryRun: Bool
    let forced: Bool
    let holder: String

    /// A sweep whose heartbeat is older than this has lost the lease.
    static let silence: Duration = .seconds(60)

    /// Which sweep to start.
    public enum Claim: Sendable {
        /// A sweep on the timer, unless any daemon has started one within the interval.
        case due(interval: Duration)
        /// The oldest request.
        case requested
        /// A new sweep, now.
        case new(SweepTrigger, dryRun: Bool, forced: Bool = false)
    }

    /// Starts a sweep.
    ///
    /// - Returns: Nil if there is nothing to start, or another sweep is running.
    public static func claim(
        _ claim: Claim, holder: String, on connection: inout Connection
    ) throws(DatabaseError) -> SweepLease? {
        try decide(on: &connection) { connection throws(DatabaseError) in
            try expire(on: &connection)
            if try connection.query("SELECT FROM tokenkeeper.sweep_run WHERE outcome = 'running'").count > 0 {
                return nil
            }
            switch claim {
            case .due(let interval):
                guard try untilDue(interval: interval, on: &connection) <= .zero else { return nil }
                return try start(.timer, dryRun: false, forced: false, holder: holder, on: &connection)
            case .requested: return try takeRequest(holder: holder, on: &connection)
            case .new(let trigger, let dryRun, let forced):
                return try start(trigger, dryRun: dryRun, forced: forced, holder: holder, on: &connection)
            }
        }
    }

    private static func start(
        _ trigger: SweepTrigger, dryRun: Bool, forced: Bool, holder: String, on connection: inout Connection
    ) throws(DatabaseError) -> SweepLease {
        let runID = try connection.query(
            """
            INSERT INTO tokenkeeper.sweep_run (trigger, dry_run, forced, outcome, started_at, heartbeat_at, daemon_id)
            VALUES ($1, $2, $3, 'running', clock_timestamp(), clock_timestamp(), $4)
            RETURNING run_id
            """, [.text(trigger.rawValue), .bool(dryRun), .bool(forced), .text(holder)]
        ).value(Int64.self)
        return SweepLease(runID: runID, trigger: trigger, dryRun: dryRun, forced: forced, holder: holder)
    }

    /// Takes up the oldest request.
    private static func takeRequest(
        holder: String, on connection: inout Connection
    ) throws(DatabaseError) -> SweepLease? {
        try connection.query(
            """
            UPDATE tokenkeeper.sweep_run
            SET outcome = 'running', started_at = clock_timestamp(), heartbeat_at = clock_timestamp(), daemon_id = $1
            WHERE run_id = (SELECT min(run_id) FROM tokenkeeper.sweep_run WHERE outcome = 'requested')
            RETURNING run_id, trigger, dry_run, forced
            """, [.text(holder)]
        ).first { row throws(DatabaseError) in
            SweepLease(
                runID: try row.read(), trigger: try row.read(), dryRun: try row.read(), forced: try row.read(),
                holder: holder)
        }
    }

    /// How long until the timer's next sweep is due; zero or less if it is due now.
    ///
    /// The last sweep counts, whichever daemon ran it: a restart does not restart the interval. After a failure the next sweep is due
    /// in five minutes, and a running sweep counts only until its heartbeat is too old, because its daemon may have died.
    public static func untilDue(interval: Duration, on connection: inout Connection) throws(DatabaseError) -> Duration {
        let milliseconds = try connection.query(
            """
            SELECT (extract(epoch FROM max(CASE outcome
                       WHEN 'failed' THEN started_at + least($1 * interval '1 microsecond', interval '5 minutes')
                       WHEN 'running' THEN heartbeat_at + $2 * interval '1 microsecond'
                       ELSE started_at + $1 * interval '1 microsecond' END) - clock_timestamp()) * 1000)::bigint
            FROM tokenkeeper.sweep_run
            WHERE NOT dry_run AND outcome IN ('running', 'finished', 'failed')
              AND started_at > clock_timestamp() - $1 * interval '1 microsecond'
            """, [.int8(interval.microseconds), .int8(silence.microseconds + 1_000_000)]
        ).value(Int64?.self)
        return .milliseconds(milliseconds ?? 0)
    }

    /// A look at `sweep_run`.
    public struct Look: Sendable {
        /// Whether a sweep was requested.
        public var isRequested: Bool
        /// The last sweep that ended, whichever daemon ran it; dry runs do not count.
        public var last: (endedAt: Instant, outcome: String)?
    }

    /// Looks for a request, which costs less than a claim, and marks runs whose heartbeat stopped as interrupted.
    public static func look(on connection: inout Connection) throws(DatabaseError) -> Look {
        let (isRequested, isSilent, endedAt, outcome) = try connection.query(
            """
            SELECT coalesce(w.requested, false), coalesce(w.silent, false), l.finished_at, l.outcome
            FROM (SELECT bool_or(outcome = 'requested') AS requested,
                         bool_or(outcome = 'running' AND heartbeat_at < clock_timestamp() - $1 * interval '1 microsecond') AS silent
                  FROM tokenkeeper.sweep_run WHERE outcome IN ('requested', 'running')) AS w
            LEFT JOIN (SELECT finished_at, outcome FROM tokenkeeper.sweep_run
                       WHERE outcome IN ('finished', 'failed', 'interrupted') AND NOT dry_run
                       ORDER BY run_id DESC LIMIT 1) AS l ON true
            """, [.int8(silence.microseconds)]
        ).one { row throws(DatabaseError) in
            (
                try row.read(Bool.self), try row.read(Bool.self), try row.read(Instant?.self),
                try row.read(String?.self)
            )
        }
        if isSilent {
            try decide(on: &connection) { connection throws(DatabaseError) in try expire(on: &connection) }
        }
        var look = Look(isRequested: isRequested)
        if let endedAt, let outcome { look.last = (endedAt, outcome) }
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

    /// Requests a sweep, like `tokenkeeper.request_sweep`, and names the trigger.
    public static func request(_ trigger: SweepTrigger, on connection: inout Connection) throws(DatabaseError) {
        try decide(on: &connection) { connection throws(DatabaseError) in
            _ = try connection.query(
                "INSERT INTO tokenkeeper.sweep_run (trigger) VALUES ($1)", [.text(trigger.rawValue)])
        }
    }

    /// Marks the runs that this holder left behind when it lost its connection as interrupted.
    public static func release(holder: String, on connection: inout Connection) throws(DatabaseError) {
        try decide(on: &connection) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_run
                SET outcome = 'interrupted', finished_at = clock_timestamp(),
                    message = 'the connection was lost; ' || \(goesOn)
                WHERE outcome = 'running' AND daemon_id = $1
                """, [.text(holder)])
        }
    }

    /// An SQL expression for the message of an interrupted sweep: what happens to the rest.
    private static let goesOn =
        "CASE WHEN forced THEN 'request another forced sweep' ELSE 'the next sweep continues where this one stopped' END"

    /// A transaction that starts, ends or requests a sweep: one at a time, across all daemons.
    private static func decide<Value>(
        on connection: inout Connection, _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        let transaction = BatchTransaction(lockTimeout: .seconds(5))
        return try connection.transaction(transaction, settings: DrainLock.sweepClaim, work)
    }
}
