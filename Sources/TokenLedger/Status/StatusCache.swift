internal import TokenModel

/// Looks for what the view `status` cannot find within milliseconds: large tables are counted here, and slow warnings are found.
///
/// At most a hundredth of the time goes into it.
public struct StatusCache {
    private var again = ContinuousClock.now
    private var cleanupHolder = CleanupHolder()
    private let clock = ContinuousClock()

    /// The shortest pause between two looks.
    private static let pause: Duration = .seconds(5)

    /// The longest: `status` believes a count for ten minutes.
    private static let longestPause: Duration = .seconds(300)

    /// One source may take so long. Then its rows are estimated, and its warnings stay as they were found last.
    private static let timeLimit: Duration = .seconds(1)

    private static let tables = ["rejected_result", "held_result", "send_request", "failed_send"]

    public init() {}

    /// Looks if it is time, and no other daemon has looked just now.
    public mutating func refresh(on connection: inout Connection) throws(DatabaseError) {
        guard clock.now >= again else { return }
        let began = clock.now
        defer { again = clock.now + min(max(Self.pause, began.duration(to: clock.now) * 100), Self.longestPause) }
        guard try isOld(on: &connection) else { return }
        for table in Self.tables {
            let counted = try store(
                table,
                "SELECT $1, count(*), NULL, clock_timestamp() FROM (SELECT FROM tokenkeeper.\(table) LIMIT 10000) AS r",
                on: &connection)
            if !counted {
                let estimate = "least(pg_stat_get_live_tuples('tokenkeeper.\(table)'::regclass), 10000)"
                try store(table, "SELECT $1, \(estimate), NULL, clock_timestamp()", on: &connection)
            }
        }
        try store(
            "rejected_result within an hour",
            """
            SELECT $1, count(*), NULL, clock_timestamp()
            FROM (SELECT r.rejected_at FROM tokenkeeper.rejected_result AS r ORDER BY r.rejected_id DESC LIMIT 10000) AS r
            WHERE r.rejected_at > clock_timestamp() - interval '1 hour'
            """, on: &connection)
        for warning in StatusWarning.all {
            try store(
                warning.name,
                "SELECT $1, NULL, array_agg(w.words), clock_timestamp() FROM (\(warning.statement) LIMIT 20) AS w (words)",
                on: &connection)
        }
        let holder = cleanupHolder.note(try CleanupHolder.Sighting(on: &connection), at: clock.now)
        try store(
            "cleanup held back", "SELECT $1, NULL, array_remove(ARRAY[$2], NULL), clock_timestamp()", [.text(holder)],
            on: &connection)
    }

    /// Whether no daemon has looked just now. False also while somebody has locked the table.
    private func isOld(on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            return try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
                try connection.query(
                    """
                    SELECT coalesce(max(c.as_of) < clock_timestamp() - $1 * interval '1 microsecond', true)
                    FROM tokenkeeper.status_cache AS c
                    """, [.int8(Self.pause.microseconds)]
                ).bool(0, 0) ?? true
            }
        } catch let error where error.remedy == .retry {
            return false
        }
    }

    private let transaction = BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: Self.timeLimit)

    /// - Parameter look: A SELECT that answers a row of `status_cache`; $1 is its source.
    /// - Returns: False when it takes too long, or somebody is in the way: then what was stored before stays.
    @discardableResult
    private func store(
        _ source: String, _ look: String, _ more: [Parameter] = [], on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        do {
            try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
                _ = try connection.query(
                    """
                    INSERT INTO tokenkeeper.status_cache AS c (source, rows, words, as_of) \(look)
                    ON CONFLICT (source) DO UPDATE SET rows = excluded.rows, words = excluded.words, as_of = excluded.as_of
                    """, [.text(source)] + more)
            }
            return true
        } catch let error where error.remedy == .retry {
            return false
        }
    }
}
