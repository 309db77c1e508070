import Foundation
import LedgerTestSupport

/// Queued registrations, applied in batches, compared with bare SQL that makes the same ledger out of a plain table.
struct RegistrationMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let bare = "bare SQL"
    private static let applied = "apply_registrations"
    private static let table = "tokenkeeper.registration_0"
    private static let pagesPerBatch = 64

    func run() throws {
        try contest(rows: scale.results, rounds: scale.rounds)
        try contest(rows: scale.manyResults, rounds: 1)
    }

    private func contest(rows: Int, rounds: Int) throws {
        let referee = Referee(reference: Self.bare)
        let contest = try Contest(
            "\(Scale.short(rows)) registrations", rounds: rounds,
            [
                contestant(Self.bare, rows, referee) { session in
                    try session.run(Recording.begin + RegistrationFloor.statements(from: "queued") + "; COMMIT")
                },
                contestant(Self.applied, rows, referee) { try Self.apply(on: $0) },
            ])
        report.add(contest)
        report.compare(
            "\(Scale.short(rows)) queued registrations, in one session, over bare SQL in one statement",
            contest.ratio(Self.applied, over: Self.bare), atLeast: 0.5, verdict: referee.verdict(Self.applied))
    }

    private func contestant(
        _ name: String, _ rows: Int, _ referee: Referee, _ work: @escaping (Session) throws -> Void
    ) -> Contest.Contestant {
        Contest.Contestant(name: name) { round in
            let database = try cluster.copy(of: template)
            defer { try? database.drop() }
            let session = try database.session()
            try Self.queue(rows, on: session, isPlain: name == Self.bare)
            try session.run("CHECKPOINT")
            let stopwatch = try Stopwatch(cluster)
            try work(session)
            let sample = try stopwatch.sample(rows: rows)
            try referee.note(name, round: "\(round + 1)", session)
            return sample
        }
    }

    /// Of a hundred rows, 60 are new tokens, 30 launches of known ones, 5 new tokens of known devices, and 5 logouts.
    private static func queue(_ rows: Int, on session: Session, isPlain: Bool) throws {
        let token = "encode(sha256(((CASE WHEN i % 100 < 60 THEN 'new' ELSE 'known' END) || i)::bytea), 'hex')"
        func registration(_ token: String, _ at: String, _ isLogout: String) -> String {
            """
            SELECT 'production' AS environment, 'com.example.queued' AS topic, \(token) AS token,
                   timestamptz '2024-01-01 00:00:00Z' + \(at) + i * interval '1 microsecond' AS registered_at,
                   CASE WHEN i % 5 < 4 AND NOT \(isLogout) THEN 'device-' || md5(i::text) END AS device_id,
                   CASE WHEN i % 10 < 7 AND NOT \(isLogout) THEN 'user-' || i / 2 END AS user_id,
                   CASE WHEN i % 100 < 90 AND i % 2 = 0 THEN ARRAY['news', 'city-' || i % 1000] END AS tags, \(isLogout) AS unregistered
            FROM generate_series(1, \(rows)) AS i
            """
        }
        // What is known before.
        try session.run(
            """
            CREATE TABLE known AS \(registration(token, "interval '0'", "false")) WHERE i % 100 >= 60;
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'com.example.queued');
            \(RegistrationFloor.statements(from: "known"));
            """)
        let next =
            "CASE WHEN i % 100 BETWEEN 90 AND 94 AND i % 5 < 4 THEN encode(sha256(('next' || i)::bytea), 'hex') ELSE \(token) END"
        let queued = registration(next, "interval '1 day'", "(i % 100 >= 95)")
        try session.run(
            isPlain
                ? "CREATE TABLE queued AS \(queued)"
                : """
                INSERT INTO \(table) (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, partition_number)
                SELECT q.*, 0 FROM (\(queued)) AS q
                """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger; VACUUM (ANALYZE) tokenkeeper.device")
    }

    private static func apply(on session: Session) throws {
        let pages = Int(
            try session.number("SELECT pg_relation_size('\(table)') / current_setting('block_size')::integer"))
        for first in stride(from: 0, to: pages, by: pagesPerBatch) {
            let waiting = try session.number(
                """
                \(Recording.begin)
                WITH gone AS (
                    DELETE FROM \(table) WHERE ctid >= '(\(first),0)' AND ctid < '(\(first + pagesPerBatch),0)' RETURNING *
                )
                SELECT waiting + rejected + held FROM tokenkeeper.apply_registrations(
                    (SELECT array_agg(g::tokenkeeper.registration) FROM gone AS g), 1000, 0.1, 1000)
                """)
            try session.run("COMMIT")
            guard waiting == 0 else { throw TestFailure("\(waiting) registrations were not applied") }
        }
    }
}

/// The same durable change as the registrations of a table make, by bare SQL: ledger, devices and history.
enum RegistrationFloor {
    static func statements(from source: String) -> String {
        """
        WITH said AS MATERIALIZED (
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(s.token, 'hex') AS token_key, s.registered_at, s.device_id, s.user_id, s.tags
            FROM \(source) AS s JOIN tokenkeeper.topic AS t ON t.topic = s.topic AND t.environment = s.environment
            WHERE NOT s.unregistered
            ORDER BY t.topic_id, token_key, s.registered_at DESC
        ), former AS MATERIALIZED (
            SELECT l.ctid AS place FROM said AS s
            JOIN tokenkeeper.ledger AS l ON l.device_id = s.device_id AND l.topic_id + 0 = s.topic_id
            WHERE l.superseded_at IS NULL AND l.token_key <> s.token_key
        ), superseded AS (
            UPDATE tokenkeeper.ledger AS l SET superseded_at = l.registered_at, suppressed_since = statement_timestamp()
            FROM former AS f WHERE l.ctid = f.place
            RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at
        ), told_of_superseded AS (
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, registered_before, registered_after,
                invalidated_after)
            SELECT topic_id, token_key, 'superseded', 'superseded', 'a newer token of the same device', device_id, user_id, registered_at, registered_at,
                   registered_at
            FROM superseded
        ), named AS (
            INSERT INTO tokenkeeper.device (topic_id, device_id, named_at, token_key)
            SELECT topic_id, device_id, registered_at, token_key FROM said WHERE device_id IS NOT NULL
            ON CONFLICT DO NOTHING
        ), kept AS (
            INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, device_id, device_at, user_id, user_at, tags, tags_at)
            SELECT topic_id, token_key, registered_at, device_id, CASE WHEN device_id IS NOT NULL THEN registered_at END,
                   user_id, CASE WHEN user_id IS NOT NULL THEN registered_at END, tags, CASE WHEN tags IS NOT NULL THEN registered_at END
            FROM said
            ON CONFLICT (topic_id, token_key) DO UPDATE
            SET registered_at = greatest(l.registered_at, excluded.registered_at), device_at = greatest(l.device_at, excluded.device_at),
                user_id = CASE WHEN excluded.user_at > l.user_at THEN excluded.user_id ELSE l.user_id END,
                user_at = greatest(l.user_at, excluded.user_at),
                tags = CASE WHEN excluded.tags_at > l.tags_at THEN excluded.tags ELSE l.tags END, tags_at = greatest(l.tags_at, excluded.tags_at)
            RETURNING topic_id, token_key, device_id, user_id, registered_at, xmax = 0 AS is_new
        )
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, registered_after)
        SELECT topic_id, token_key, 'registered', 'registration', device_id, user_id, registered_at FROM kept WHERE is_new;
        WITH said AS MATERIALIZED (
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(s.token, 'hex') AS token_key, s.registered_at AS at
            FROM \(source) AS s JOIN tokenkeeper.topic AS t ON t.topic = s.topic AND t.environment = s.environment
            WHERE s.unregistered
            ORDER BY t.topic_id, token_key, s.registered_at DESC
        ), changed AS (
            UPDATE tokenkeeper.ledger AS l SET unregistered_by_app_at = s.at, suppressed_since = statement_timestamp()
            FROM said AS s WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key
            RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at, l.unregistered_by_app_at
        )
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, registered_before, registered_after,
            invalidated_after)
        SELECT topic_id, token_key, 'unregistered_by_app', 'unregistered_by_app', device_id, user_id, registered_at, registered_at,
               unregistered_by_app_at
        FROM changed
        """
    }
}
