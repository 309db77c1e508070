/// The roles and their rights: `migrations/grants.sql`.
public enum Grants {
    /// The script, for a DBA to read or run.
    public static let sql = Migration.embeddedFiles["grants.sql"] ?? ""

    /// Makes what roles are missing and grants them their rights; as often as one likes.
    public static func apply(_ connection: inout Connection) throws(DatabaseError) {
        try connection.transaction("BEGIN; SET LOCAL lock_timeout = '5s'; SET LOCAL search_path = pg_catalog, pg_temp")
        {
            connection throws(DatabaseError) in
            try connection.run(DrainLock.migration)
            try connection.run(sql)
        }
    }

    /// Whether all five roles exist already.
    public static func rolesExist(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            """
            SELECT count(*) FROM pg_catalog.pg_roles WHERE rolname IN ('tokenkeeper_sender', 'tokenkeeper_app',
                'tokenkeeper_reader', 'tokenkeeper_operator', 'tokenkeeper_daemon')
            """
        ).integer(0, 0) == 5
    }
}
