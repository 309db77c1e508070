public import TokenModel

/// Stores what the view `status` cannot compute within milliseconds: counts of large tables, and warnings that take a search.
///
/// Start here for `status`: the view is in `migrations/`, and `Heartbeat` and this file write the tables that it reads.
/// The cache takes at most 1 % of the daemon's time.
public struct StatusCache {
    private var again = ContinuousClock.now
    private var cleanupHolder = CleanupHolder()
    /// Since when each warning has been found, by its name.
    private var foundSince: [String: ContinuousClock.Instant] = [:]
    private let clock = ContinuousClock()

    /// The shortest pause between two looks.
    private let shortestPause: Duration

    /// The longest pause: `status` trusts a count for ten minutes.
    private static let longestPause: Duration = .seconds(300)

    /// How long one source may take. After that its rows are estimated, and its warnings stay as they were.
    private static let timeLimit: Duration = .seconds(1)

    private static let tables = [
        "rejected_result", "rejected_registration", "held_result", "held_registration", "send_request", "failed_send",
    ]

    /// What a person must fix: the first look of the last refresh that was refused; nil if none was.
    public private(set) var trouble: DatabaseError?

    public init(_ timing: Timing) { shortestPause = timing.statusCache }

    /// The findings, by the source's name. A source that took too long, met a lock or was refused adds none, and keeps its stored
    /// row until `status` no longer trusts it.
    private struct Findings {
        var rows: [(source: String, rows: Int64?)] = []
        var words: [(source: String, word: String)] = []
        /// Since when the oldest unclaimed request of the outbox has been due, or will be.
        var oldestDueAt: Instant?
        /// The topics whose requests are overdue: rows of `overdue_requests()`, each as text. Nil if that look failed.
        var overdue: [String]?
    }

    /// Refreshes the cache if it is time and no other daemon has just done so.
    public mutating func refresh(
        on connection: inout Connection, at now: ContinuousClock.Instant = .now
    ) throws(DatabaseError) {
        guard now >= again else { return }
        let began = clock.now
        defer { again = clock.now + pause(since: began) }
        // While another daemon refreshes the cache, this one learns nothing new about what a person must fix.
        guard try isOld(on: &connection) else { return }
        trouble = nil
        var findings = Findings()
        try countTables(into: &findings, on: &connection)
        for warning in StatusWarning.all {
            guard let words = try look("\(warning.statement) LIMIT 20", String.self, on: &connection) else { continue }
            findings.rows.append((warning.name, nil))
            foundSince[warning.name] = words.isEmpty ? nil : foundSince[warning.name] ?? now
            guard let since = foundSince[warning.name], since.duration(to: now) >= warning.patience else { continue }
            findings.words += words.map { (warning.name, $0) }
        }
        let sighting = try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
            try CleanupHolder.Sighting(on: &connection)
        }
        if let sighting {
            findings.rows.append(("cleanup held back", nil))
            let holder = cleanupHolder.note(sighting, at: clock.now)
            if let holder { findings.words.append(("cleanup held back", holder)) }
        }
        try store(findings, pause: pause(since: began), on: &connection)
        try noteTokens(on: &connection)
    }

    /// The pause after a refresh that began at this moment.
    private func pause(since began: ContinuousClock.Instant) -> Duration {
        min(max(shortestPause, began.duration(to: clock.now) * 100), Self.longestPause)
    }

    private mutating func countTables(
        into findings: inout Findings, on connection: inout Connection
    ) throws(DatabaseError) {
        for table in Self.tables {
            var rows = try look(
                "SELECT count(*) FROM (SELECT FROM tokenkeeper.\(table) \(table == "send_request" ? "WHERE campaign_id IS NULL" : "") LIMIT 10000) AS r",
                Int64.self, on: &connection)
            if rows == nil {
                rows = try look(
                    "SELECT least(pg_stat_get_live_tuples('tokenkeeper.\(table)'::regclass), 10000)", Int64.self,
                    on: &connection)
            }
            if let rows = rows?.first { findings.rows.append((table, rows)) }
        }
        findings.oldestDueAt = try oldestDueAt(on: &connection)
        findings.overdue = try look(
            "SELECT o::text FROM tokenkeeper.overdue_requests() AS o", String.self, on: &connection)
        // Without them, the row of the outbox stays as it was, until it is too old.
        if findings.overdue == nil { findings.rows.removeAll { $0.source == "send_request" } }
        for table in ["rejected_result", "rejected_registration"] {
            let lately = try look(
                """
                SELECT count(*)
                FROM (SELECT r.rejected_at FROM tokenkeeper.\(table) AS r ORDER BY r.rejected_id DESC LIMIT 10000) AS r
                WHERE r.rejected_at > clock_timestamp() - interval '1 hour'
                """, Int64.self, on: &connection)
            if let rows = lately?.first { findings.rows.append(("\(table) within an hour", rows)) }
        }
    }

    private mutating func oldestDueAt(on connection: inout Connection) throws(DatabaseError) -> Instant? {
        try look(
            """
            SELECT (extract(epoch FROM min(s.due_at)) * 1000000)::bigint FROM tokenkeeper.waiting_topics() AS s HAVING count(*) > 0
            """, Int64.self, on: &connection)?.first.map(Instant.init(microseconds:))
    }

    /// Whether the cache is older than the pause. False as well while another session has locked the table.
    private mutating func isOld(on connection: inout Connection) throws(DatabaseError) -> Bool {
        try look(
            """
            SELECT coalesce(max(c.as_of) < clock_timestamp() - \(shortestPause.milliseconds) * interval '1 millisecond', true)
            FROM tokenkeeper.status_cache AS c
            """, Bool.self, on: &connection)?.first ?? false
    }

    private let transaction = BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: Self.timeLimit)

    /// Reads one column, in one round trip.
    ///
    /// - Returns: Nil as in `Connection.attempt`.
    private mutating func look<Value: ColumnDecodable>(
        _ statement: String, _ type: Value.Type, on connection: inout Connection
    ) throws(DatabaseError) -> [Value]? {
        let settings = transaction.settings
        return try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
            try connection.run("\(settings)\n\(statement)").values(type)
        }
    }

    /// Stores all findings in one statement. If that fails, the earlier findings stay, and the next refresh tries again.
    private mutating func store(
        _ findings: Findings, pause: Duration, on connection: inout Connection
    ) throws(DatabaseError) {
        let transaction = transaction
        _ = try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
            try connection.transaction(transaction) { connection throws(DatabaseError) in
                _ = try connection.query(
                    """
                    INSERT INTO tokenkeeper.status_cache AS c (source, rows, words, as_of, pause, oldest_due_at, pages)
                    SELECT s.source, s.rows,
                           (SELECT array_agg(w.words ORDER BY w.place)
                            FROM unnest($3, $4) WITH ORDINALITY AS w (source, words, place) WHERE w.source = s.source),
                           clock_timestamp(), $5 * interval '1 microsecond', CASE s.source WHEN 'send_request' THEN $6 END,
                           CASE s.source WHEN 'send_request' THEN $7::text[]::tokenkeeper.page[] END
                    FROM unnest($1, $2) AS s (source, rows)
                    ON CONFLICT (source) DO UPDATE SET rows = excluded.rows, words = excluded.words, as_of = excluded.as_of,
                        pause = excluded.pause, oldest_due_at = excluded.oldest_due_at, pages = excluded.pages
                    """,
                    [
                        .texts(findings.rows.map(\.source)), .int8s(findings.rows.map(\.rows)),
                        .texts(findings.words.map(\.source)), .texts(findings.words.map(\.word)),
                        .int8(pause.microseconds), .instant(findings.oldestDueAt), .texts(findings.overdue ?? []),
                    ])
            }
        }
    }

    /// Notes how many tokens are in each state at this hour.
    private mutating func noteTokens(on connection: inout Connection) throws(DatabaseError) {
        let transaction = transaction
        _ = try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
            try connection.transaction(transaction) { connection throws(DatabaseError) in
                _ = try connection.query(
                    """
                    INSERT INTO tokenkeeper.token_count_hour AS h (hour, state, tokens)
                    SELECT \(ResultCounts.hourInSQL), s.state, coalesce(sum(c.tokens), 0)
                    FROM unnest($1) AS s (state) LEFT JOIN tokenkeeper.token_count AS c ON c.state = s.state
                    GROUP BY s.state
                    ON CONFLICT (hour, state) DO UPDATE SET tokens = excluded.tokens WHERE h.tokens <> excluded.tokens
                    """, [.texts(Overview.states)])
            }
        }
    }
}
