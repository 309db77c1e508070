/// The undo of suspects: those of a topic whose instant lies in a window do not count, now and whenever they arrive.
public struct Reinstatement: Sendable {
    /// How many tokens may be sent to again.
    public let tokens: Int64
    /// How many results of the topic the guard holds still.
    public let held: Int64
    /// The window, as PostgreSQL understood it, in UTC.
    public let window: (since: String, until: String)

    /// - Parameters:
    ///   - since: As PostgreSQL takes a `timestamptz`; UTC where it names no zone.
    ///   - until: The same; nil for this moment.
    ///   - dryRun: Does it all and rolls it back: the count is exact.
    public init(
        topic: String, environment: String, since: String, until: String?, dryRun: Bool,
        on connection: inout Connection
    ) throws(DatabaseError) {
        do {
            try connection.run(OperatorTransaction.begin)
            let row = try connection.query(
                """
                SELECT tokenkeeper.reinstate($1, $2, w.since, w.until), w.since::text, w.until::text,
                       (SELECT count(*) FROM tokenkeeper.held_result AS h
                        WHERE h.topic = $1 AND coalesce(h.environment, 'production') = $2)
                FROM (SELECT $3::text::timestamptz AS since, coalesce($4::text::timestamptz, clock_timestamp()) AS until) AS w
                """, [.text(topic), .text(environment), .text(since), .text(until)])
            tokens = row.integer(0, 0) ?? 0
            window = (row.text(0, 1) ?? "", row.text(0, 2) ?? "")
            held = row.integer(0, 3) ?? 0
            if dryRun {
                connection.rollback()
            } else {
                try connection.commit()
            }
        } catch {
            connection.rollback()
            throw error
        }
    }
}
