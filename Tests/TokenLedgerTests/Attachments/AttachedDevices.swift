import LedgerTestSupport

/// A schema `app` of the application's login, with a table of devices, and what tests do to it.
struct AttachedDevices {
    let database: TestDatabase

    static let arguments = """
        token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen', device_id => 'device', user_id => 'user_id', \
        tags => 'tags', logged_out => 'logged_out_at IS NOT NULL'
        """

    /// - Parameters:
    ///   - table: Everything after `CREATE TABLE`.
    ///   - first: What the application's login runs before.
    init(
        table: String = """
        app.devices (id bigserial PRIMARY KEY, push_token varchar(200), bundle_id text DEFAULT 't', last_seen timestamptz, device text,
            user_id integer, tags text[], logged_out_at timestamptz, badge integer DEFAULT 0)
        """, first: String = "SELECT", in cluster: TestCluster = .shared
    ) throws {
        database = try cluster.database()
        try database.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try app(first)
        try app("CREATE TABLE \(table)")
        try app("CREATE INDEX ON app.devices (push_token)")
        try database.psql("SELECT tokenkeeper.prepare_event_months()")
    }

    @discardableResult
    func app(_ sql: String) throws -> String { try database.psql(sql, user: "a_app") }

    /// Attaches the table, and returns the number of the source.
    @discardableResult
    func attach(_ more: String = "", arguments: String = Self.arguments) throws -> String {
        try app("SELECT FROM tokenkeeper.attach('app.devices', \(arguments)\(more.isEmpty ? "" : ", " + more))")
        return try app("SELECT source_id FROM tokenkeeper.attachment WHERE name = 'app.devices'")
    }

    /// What is queued, oldest first: token, device, user, tags, and `out` for a logout.
    func queued() throws -> [String] {
        try database.psql(
            """
            SELECT concat_ws(' ', left(token, 4), device_id, user_id, tags::text, CASE WHEN unregistered THEN 'out' END)
            FROM tokenkeeper.registration ORDER BY queued_at
            """
        ).split(separator: "\n").map(String.init)
    }

    func forgetQueue() throws { try database.psql("DELETE FROM tokenkeeper.registration") }

    /// Applies what is queued, as the daemon does.
    func drain() throws {
        try database.psql(
            """
            WITH gone AS (DELETE FROM tokenkeeper.registration RETURNING *)
            SELECT FROM tokenkeeper.apply_registrations((SELECT array_agg(g::tokenkeeper.registration) FROM gone AS g), 1000000, 0.5, 1000)
            """)
    }

    /// Applies what is queued one by one, the last row first: the order does not matter.
    func drainBackwards() throws {
        while try database.psql("SELECT count(*) FROM tokenkeeper.registration") != "0" {
            try database.psql(
                """
                WITH gone AS (DELETE FROM tokenkeeper.registration WHERE queued_at = (SELECT max(queued_at) FROM tokenkeeper.registration) RETURNING *)
                SELECT FROM tokenkeeper.apply_registrations((SELECT array_agg(g::tokenkeeper.registration) FROM gone AS g), 1000000, 0.5, 1000)
                """)
        }
    }

    /// The state of each token, by its first four characters.
    func states() throws -> String {
        try database.psql(
            "SELECT string_agg(left(token, 4) || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token")
    }
}
