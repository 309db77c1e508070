internal import TokenModel

/// The undo of suspects: those of a topic whose instant lies in a window do not count, now and whenever they arrive.
///
/// `tokenkeeper.reinstate` records the window. The recorded suspects are undone afterwards, in short transactions, by the daemons and by
/// callers of `undo`. Several may run at once. If one ends early, `tokenkeeper.suspect` still has the rest.
public struct Reinstatement: Sendable {
    /// Suspects that were recorded and are to be undone. Of a dry run, the tokens that would be sendable again.
    public let suspects: Int64
    /// How many results of the topic the guard holds still.
    public let held: Int64
    /// The window, as PostgreSQL understood it, in UTC.
    public let window: (since: String, until: String)
    /// By the server's clock.
    private let begunAt: Instant
    private let topic: String
    private let environment: String

    /// - Parameters:
    ///   - since: As PostgreSQL takes a `timestamptz`; UTC where it names no zone.
    ///   - until: The same; nil for this moment.
    ///   - dryRun: Counts only, and locks nothing.
    public init(
        topic: String, environment: String, since: String, until: String?, dryRun: Bool,
        on connection: inout Connection
    ) throws(DatabaseError) {
        let function = dryRun ? "would_reinstate" : "reinstate"
        let begun = try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT tokenkeeper.\(function)($1, $2, w.since, w.until), w.since::text, w.until::text,
                       (SELECT count(*) FROM tokenkeeper.held_result AS h
                        WHERE h.topic = $1 AND coalesce(h.environment, 'production') = $2), statement_timestamp()
                FROM (SELECT $3::text::timestamptz AS since, coalesce($4::text::timestamptz, clock_timestamp()) AS until) AS w
                """, [.text(topic), .text(environment), .text(since), .text(until)]
            ).one { row throws(DatabaseError) in
                (
                    suspects: try row.read(Int64.self),
                    window: (since: try row.read(String.self), until: try row.read(String.self)),
                    held: try row.read(Int64.self), at: try row.read(Instant.self)
                )
            }
        }
        suspects = begun.suspects
        window = begun.window
        held = begun.held
        begunAt = begun.at
        self.topic = topic
        self.environment = environment
    }

    /// Undoes the suspects of this window to the end, and of every other window of the topic that is not finished, or sees daemons do it.
    ///
    /// - Parameter progress: Called once a second with the number of suspects left, of which more than 10,000 are told as 10,000, and that of
    ///   tokens that may be sent to again so far.
    /// - Returns: How many tokens may be sent to again because of these windows.
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
            // A daemon is at it, or an application holds what is left.
            pause.wait(for: .milliseconds(50))
        }
    }

    /// Takes the next steps of what `tokenkeeper.reinstate` has left to do, of whatever topic: short transactions, one after the other.
    ///
    /// - Parameter goesOn: Asked before each step.
    /// - Returns: Whether there is more to do at once. False also where all that is left is in the hands of applications, or of another session.
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
            // Twice nothing for each window: what is left is in the hands of applications, and waits for the next call.
            if left == 0 || (left == open && idle >= 2 * left) { return false }
            if left != open { idle = 0 }
            open = left
            guard goesOn(), ContinuousClock.now < end else { return true }
            do {
                let undone: Int64? = try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
                    connection throws(DatabaseError) in
                    try connection.query("SELECT tokenkeeper.undo_suspects()").value()
                }
                guard let undone else { return false }
                idle = undone == 0 ? idle + 1 : 0
            } catch let error where error.remedy == .retry {
                // Somebody is at the topic's guard.
                return false
            }
        }
    }
}
