/// A ledger that grows by steps. Each row has the shape that `register` and the results leave.
///
/// Token n is the SHA-256 of the number n. Rows are in the order of n, so neighbours in an index are anywhere in the table, as in a
/// ledger that has grown for years. The indexes are built after each step instead of row by row, which takes a tenth of the time, and
/// are left as full as random insertions leave them (`fillfactor`).
struct GrowingLedger {
    let database: Database
    private(set) var tokens = 0

    /// How full random insertions leave the pages of a B-tree, in percent: ln 2.
    private static let fillfactor = 70
    private static let chunk = 200_000
    /// Coprime to all sizes, so that consecutive positions are anywhere in the ledger.
    private static let step = 618_033_989

    init(_ database: Database) throws {
        self.database = database
        let session = try database.session()
        for topic in Workload.topics {
            try session.run("INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', '\(topic)')")
        }
        try session.run("SELECT tokenkeeper.prepare_event_months()")
    }

    /// Of a hundred tokens, one has been stale for longer than the retention, one is stale, half a one is unregistered by the app, and half a one
    /// is superseded; all others are active.
    static func isDue(_ number: String) -> String { "(\(number)) % 100 = 11" }

    static func key(_ number: String) -> String { "sha256((\(number))::text::bytea)" }
    static func token(_ number: String) -> String { "encode(\(key(number)), 'hex')" }
    static func topicID(_ number: String) -> String { "1 + ((\(number)) % 3)::integer" }
    static func topic(_ number: String) -> String {
        "(ARRAY['\(Workload.topics.joined(separator: "','"))'])[\(topicID(number))]"
    }
    static func device(_ number: String) -> String { "md5('device-' || (\(number)))::uuid::text" }

    /// A token from anywhere in the ledger, by position.
    func anyToken(_ position: String) -> String { "((\(position))::bigint * \(Self.step) % \(tokens) + 1)" }

    /// One of the tokens n with n % 100 = `rest`, which are active and have a device, a user and tags.
    ///
    /// - Parameter rest: What changes tokens has its own ones, which a later step then does not meet in another state.
    func activeToken(_ position: String, rest: Int = 21) -> String {
        "((\(position))::bigint * \(Self.step) % \(tokens / 100) * 100 + \(rest))"
    }

    /// Adds tokens until the ledger has had this many, and vacuums.
    mutating func grow(to size: Int) throws {
        // A relation in use keeps its list of indexes, so each part has its own session.
        try database.session().run(
            "UPDATE pg_index SET indisready = false WHERE indrelid IN (\(Self.tables))")
        let session = try database.session()
        for first in stride(from: tokens + 1, through: size, by: Self.chunk) {
            try session.run(Self.insertion(first...min(first + Self.chunk - 1, size)))
            if (first - 1) % 1_000_000 == 0 { Progress.say("filling: \(first - 1) of \(size) tokens") }
        }
        tokens = size
        Progress.say("building the indexes of \(Scale.short(size)) tokens")
        for index in try session.texts(
            """
            SELECT i.indexrelid::regclass FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_am AS a ON a.oid = c.relam
            WHERE i.indrelid IN (\(Self.tables)) AND a.amname = 'btree'
            """)
        {
            try session.run("ALTER INDEX \(index) SET (fillfactor = \(Self.fillfactor))")
        }
        try session.run("REINDEX TABLE tokenkeeper.ledger")
        try session.run("VACUUM (ANALYZE)")
        try session.run("CHECKPOINT")
    }

    /// Registers new tokens of new devices one by one, with the same columns.
    func register(_ count: Int) throws {
        let session = try database.session()
        try session.run(
            """
            SELECT count(tokenkeeper.register(\(Self.token("n")), \(Self.topic("n")), device_id => \(Self.device("n")),
                user_id => CASE WHEN n % 10 < 7 THEN 'user-' || n / 2 END,
                tags => CASE WHEN n % 5 > 0 THEN ARRAY['city-' || n % 997, 'lang-' || n % 31, 'news'] END))
            FROM generate_series(1::bigint, \(count)) AS n
            """)
    }

    private static let tables = "'tokenkeeper.ledger'::regclass"

    private static func insertion(_ numbers: ClosedRange<Int>) -> String {
        """
        WITH new AS MATERIALIZED (
            SELECT n, \(topicID("n")) AS topic_id, \(key("n")) AS token_key,
                   \(device("CASE WHEN n % 200 = 0 THEN n + 3 ELSE n END")) AS device_id,
                   now() - interval '200 days' + n % 8640000 * interval '1 second' AS at,
                   CASE WHEN n % 10 < 7 THEN 'user-' || n / 2 END AS user_id,
                   CASE WHEN \(isDue("n")) THEN now() - interval '100 days'
                        WHEN n % 100 = 12 OR n % 200 IN (0, 13) THEN now() - interval '20 days' END AS since
            FROM generate_series(\(numbers.lowerBound)::bigint, \(numbers.upperBound)) AS n
        ), events AS (
            INSERT INTO tokenkeeper.token_event_log (at, topic_id, token_key, event, cause, device_id, user_id, registered_after)
            SELECT now() - n % 20 * interval '1 day', topic_id, token_key, 'registered', 'registration', device_id, user_id, at
            FROM new WHERE n % 20 = 1
        ), suppressed AS (
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) SELECT since, topic_id, token_key FROM new WHERE since IS NOT NULL
        )
        INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, device_at, user_id, user_at, tags, tags_at,
            stale_at, stale_reason, unregistered_by_app_at, superseded_at)
        SELECT topic_id, token_key, at, device_id, at, user_id, CASE WHEN user_id IS NOT NULL THEN at END,
               CASE WHEN n % 1000 = 1 THEN ARRAY['city-' || n % 997, 'lang-' || n % 31, 'news', '\(Workload.rareTag)']
                    WHEN n % 5 > 0 THEN ARRAY['city-' || n % 997, 'lang-' || n % 31, 'news'] END,
               CASE WHEN n % 5 > 0 THEN at END,
               CASE WHEN n % 100 IN (11, 12) THEN at + interval '1 day' END, CASE WHEN n % 100 IN (11, 12) THEN 'Unregistered' END,
               CASE WHEN n % 200 = 13 THEN at + interval '1 day' END,
               CASE WHEN n % 200 = 0 THEN at END
        FROM new
        """
    }

    /// The bytes of an event of the history, with its indexes.
    func bytesOfEvent() throws -> Double {
        try database.session().number(
            """
            SELECT sum(pg_total_relation_size(inhrelid)) / greatest((SELECT count(*) FROM tokenkeeper.token_event_log), 1)
            FROM pg_inherits WHERE inhparent = 'tokenkeeper.token_event_log'::regclass
            """)
    }

    /// The bytes of the table of tokens and of its indexes, the greatest first.
    func sizes() throws -> [(relation: String, bytes: Double)] {
        try database.session().texts(
            """
            SELECT c.relname || ' ' || pg_relation_size(c.oid) FROM pg_class AS c
            WHERE c.oid IN (\(Self.tables)) OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid IN (\(Self.tables)))
            ORDER BY pg_relation_size(c.oid) DESC
            """
        ).map { line in
            let words = line.split(separator: " ")
            return (String(words[0]), Double(words[1]) ?? .nan)
        }
    }
}
