/// The roles and their rights: `migrations/grants.sql`.
public enum Grants {
    static let file = "grants.sql"

    /// The script, for a DBA to read or run.
    public static let sql = SchemaFiles.embeddedTexts[file] ?? ""

    /// The first statement of the script, which creates the roles that are missing.
    static let creation: String = {
        let end = sql.firstRange(of: "\n$$;\n")?.upperBound ?? sql.startIndex
        return String(sql[..<end])
    }()

    /// Creates the roles that are missing, as the session's role. If that one may not, it creates none: the owner may.
    public static func createRoles(on connection: inout Connection) throws(DatabaseError) {
        if try rolesExist(&connection) { return }
        do { try connection.run(creation) } catch let error where error.sqlState == "42501" { return }
    }

    /// Creates missing roles and grants all roles their rights. Can be repeated.
    ///
    /// - Parameter daemon: The version of this daemon. Its schema must be applied.
    public static func apply(_ connection: inout Connection, daemon: Version) throws {
        let migrator = Migrator(daemon: daemon)
        try migrator.check(&connection)
        try migrator.migrate(&connection, createsRoles: true) { _ in }
    }

    /// The roles that the script creates.
    static let roles = ["sender", "app", "reader", "monitor", "operator", "daemon"].map { "tokenkeeper_\($0)" }

    /// Whether all roles exist.
    static func rolesExist(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query("SELECT count(*) FROM pg_catalog.pg_roles WHERE rolname = ANY ($1)", [.texts(roles)])
            .value(Int.self) == roles.count
    }
}
