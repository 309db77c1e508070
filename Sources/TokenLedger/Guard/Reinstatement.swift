internal import TokenModel

/// Undoes the results of a topic that were received within a window: they do not count, whenever a daemon records them.
///
/// `tokenkeeper.reinstate` records the window. Then daemons and callers of `undo` undo the recorded results, in short
/// transactions. Several may run at once. If one ends early, the rest is still in `tokenkeeper.receipt`.
public struct Reinstatement: Sendable {
    /// Which results are undone.
    public enum Cause: String, CaseIterable, Sendable {
        case suspect
        case stale
        /// Logouts that a source reported: an attached table, a backfill or a file.
        case unregisteredByApp = "unregistered_by_app"
    }

    /// The recorded results to undo. In a dry run, the tokens that would be sendable again.
    public let results: Int64
    /// Tokens that the results of these hours had suppressed and that were pruned since: nothing restores them.
    public let pruned: Int64
    /// How many results or logouts of the topic and cause the guard still holds.
    public let held: Int64
    /// The window, as PostgreSQL understood it, in UTC.
    public let window: (since: String, until: String)
    /// By the server's clock.
    private let begunAt: Instant
    private let topic: String
    private let environment: String

    /// - Parameters:
    ///   - since: A `timestamptz` as PostgreSQL reads it; in UTC if it names no zone.
    ///   - until: The same; nil for now.
    ///   - dryRun: Only counts, and locks nothing.
    public init(
        _ cause: Cause, topic: String, environment: String, since: String, until: String?, dryRun: Bool,
        on connection: inout Connection
    ) throws(DatabaseError) {
        let function = dryRun ? "would_reinstate" : "reinstate"
        let begun = try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT tokenkeeper.\(function)($1, $2, w.since, w.until, $5),
                       (w.since AT TIME ZONE 'UTC')::text || ' UTC', (w.until AT TIME ZONE 'UTC')::text || ' UTC',
                       tokenkeeper.pruned_since($1, $2, w.since, w.until, $5),
                       CASE $5 WHEN 'unregistered_by_app' THEN
                           (SELECT count(*) FROM tokenkeeper.held_registration AS h
                            WHERE h.topic = $1 AND coalesce(h.environment, 'production') = $2)
                       ELSE (SELECT count(*) FROM tokenkeeper.held_result AS h
                             WHERE h.topic = $1 AND coalesce(h.environment, 'production') = $2 AND h.cause = $5) END, statement_timestamp()
                FROM (SELECT $3::text::timestamptz AS since, coalesce($4::text::timestamptz, clock_timestamp()) AS until) AS w
                """, [.text(topic), .text(environment), .text(since), .text(until), .text(cause.rawValue)]
            ).one { row throws(DatabaseError) in
                (
                    results: try row.read(Int64.self),
                    window: (since: try row.read(String.self), until: try row.read(String.self)),
                    pruned: try row.read(Int64.self),
                    held: try row.read(Int64.self), at: try row.read(Instant.self)
                )
            }
        }
        results = begun.results
        pruned = begun.pruned
        window = begun.window
        held = begun.held
        begunAt = begun.at
        self.topic = topic
        self.environment = environment
    }

    /// Undoes the results of this window and of every other unfinished window of the topic, together with any daemons that do
    /// the same. Returns when all are undone.
    ///
    /// - Parameter progress: Called once a second with the number of results left, at most 10,000, and the number of tokens that
    ///   are sendable again so far.
    /// - Returns: How many tokens are sendable again because of these windows.
    public func finish(
        on connection: inout Connection, progress: (_ left: Int64, _ tokens: Int64) -> Void
    ) throws(DatabaseError) -> Int64 {
        let pause = Wakeup()
        var toldAt = ContinuousClock.now
        while true {
            _ = try Self.undo(within: .seconds(1), on: &connection) { true }
            let state = try connection.query(
                """
                SELECT coalesce(sum(r.remaining) FILTER (WHERE r.finished_at IS NULL), 0)::bigint, count(*) FILTER (WHERE r.finished_at IS NULL),
                       coalesce(sum(r.tokens) FILTER (WHERE coalesce(r.finished_at >= $3, true)), 0)::bigint
                FROM tokenkeeper.reinstatement AS r WHERE r.topic = $1 AND r.environment = $2
                """, [.text(topic), .text(environment), .instant(begunAt)]
            ).one { row throws(DatabaseError) in
                (left: try row.read(Int64.self), windows: try row.read(Int64.self), tokens: try row.read(Int64.self))
            }
            if state.windows == 0 { return state.tokens }
            if toldAt.duration(to: .now) > .seconds(1) {
                toldAt = .now
                progress(state.left, state.tokens)
            }
            // A daemon is working on the rest, or an application has locked it.
            pause.wait(for: .milliseconds(50))
        }
    }

    /// Undoes the recorded results of all unfinished windows, of any topic, in short transactions one after the other.
    ///
    /// - Parameter goesOn: Asked before each step.
    /// - Returns: Whether there is more to do now. False as well if other sessions have locked all that is left.
    public static func undo(
        within time: Duration, on connection: inout Connection, while goesOn: () -> Bool
    ) throws(DatabaseError) -> Bool {
        let end = ContinuousClock.now + time
        var idle: Int64 = 0
        var open = Int64.max
        while true {
            let left: Int64 = try connection.query(
                "SELECT count(*) FROM tokenkeeper.reinstatement WHERE finished_at IS NULL"
            ).value()
            // Every window has yielded nothing twice: applications have locked what is left, and it waits for the next call.
            if left == 0 || (left == open && idle >= 2 * left) { return false }
            if left != open { idle = 0 }
            open = left
            guard goesOn(), ContinuousClock.now < end else { return true }
            do {
                let undone: Int64? = try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
                    connection throws(DatabaseError) in
                    try connection.query("SELECT tokenkeeper.undo_next()").value()
                }
                guard let undone else { return false }
                idle = undone == 0 ? idle + 1 : 0
            } catch let error where error.remedy == .retry {
                // Another session is at it.
                return false
            }
        }
    }
}
