import Foundation
import LedgerTestSupport

/// Registrations of a topic, in a file, and a ledger that already knows some of their tokens.
///
/// Of a hundred rows, 60 are new tokens, 30 launches of known ones, 5 new tokens of known devices, and 5 logouts.
struct RegistrationWorkload {
    let rows: Int
    private let cluster: PrivateCluster
    /// The database that is copied for each contestant.
    private let template: String
    /// The rows as COPY reads them, on the server.
    private let file: String

    static let topic = "com.example.queued"
    static let columns = "environment, topic, token, registered_at, device_id, user_id, tags, unregistered"

    /// - Parameter ledger: The database whose ledger gets the known tokens, too.
    init(rows: Int, on cluster: PrivateCluster, from ledger: String) throws {
        self.rows = rows
        self.cluster = cluster
        template = "registrations_\(rows)"
        file = "\(cluster.cluster.folder)/\(template).tsv"
        Progress.say("adding the known tokens of \(Scale.short(rows)) registrations to a ledger")
        try cluster.session("postgres").run("CREATE DATABASE \(template) TEMPLATE \(ledger) STRATEGY file_copy")
        let session = try cluster.session(template)
        try session.run(
            """
            CREATE TABLE known AS \(known);
            ANALYZE known;
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', '\(Self.topic)');
            \(RegistrationFloor.statements(from: "known"));
            DROP TABLE known
            """)
        for table in ["ledger", "topic", "token_event_log"] {
            try session.run("VACUUM (ANALYZE) tokenkeeper.\(table)")
        }
        try session.run("COPY (\(queued)) TO '\(file)'")
    }

    func drop() throws {
        try cluster.drop(template)
        try? FileManager.default.removeItem(atPath: file)
    }

    /// A database with the known tokens, in memory.
    func copy() throws -> Database {
        let database = try cluster.copy(of: template)
        try database.session().run(
            """
            SELECT sum(pg_prewarm(c.oid)) FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'i') AND pg_relation_size(c.oid) > 0
            """)
        return database
    }

    /// A plain table for the rows.
    static func create(_ table: String) -> String {
        """
        CREATE TABLE \(table) (environment text, topic text, token text, registered_at timestamptz, device_id text, user_id text, tags text[],
            unregistered boolean)
        """
    }

    func copyStatement(into table: String) -> String { "COPY \(table) (\(Self.columns)) FROM '\(file)'" }

    /// The rows as COPY reads them, for a client.
    func lines() throws -> [[UInt8]] {
        try String(contentsOfFile: file, encoding: .utf8).split(separator: "\n").map { Array($0.utf8) + [10] }
    }

    private static let token =
        "encode(sha256(((CASE WHEN i % 100 < 60 THEN 'new' ELSE 'known' END) || i)::bytea), 'hex')"

    /// What the ledger knows before.
    private var known: String {
        registrations(token: Self.token, at: "interval '0'", isLogout: "false") + " WHERE i % 100 >= 60"
    }

    private var queued: String {
        registrations(
            token: """
                CASE WHEN i % 100 BETWEEN 90 AND 94 AND i % 5 < 4 THEN encode(sha256(('next' || i)::bytea), 'hex') ELSE \(Self.token) END
                """,
            at: "interval '1 day'", isLogout: "(i % 100 >= 95)")
    }

    private func registrations(token: String, at: String, isLogout: String) -> String {
        """
        SELECT 'production' AS environment, '\(Self.topic)' AS topic, \(token) AS token,
               timestamptz '2024-01-01 00:00:00Z' + \(at) + i * interval '1 microsecond' AS registered_at,
               CASE WHEN i % 5 < 4 AND NOT \(isLogout) THEN 'device-' || md5(i::text) END AS device_id,
               CASE WHEN i % 10 < 7 AND NOT \(isLogout) THEN 'user-' || i / 2 END AS user_id,
               CASE WHEN i % 100 < 90 AND i % 2 = 0 THEN ARRAY['news', 'city-' || i % 1000] END AS tags, \(isLogout) AS unregistered
        FROM generate_series(1, \(rows)) AS i
        """
    }
}
