extension Migrator {
    /// For reading the schema: all statements see the same moment, and the role's own timeouts do not count.
    private static let reading = BatchTransaction(mode: .snapshot, lockTimeout: .seconds(60))

    /// Reads what was applied, and the checksums of what is wanted, in a transaction of its own.
    func read(_ connection: inout Connection) throws(DatabaseError) -> (state: SchemaState, checksums: [String: String])
    {
        try connection.transaction(Self.reading) { connection throws(DatabaseError) in
            (state: try state(&connection), checksums: try checksums(&connection))
        }
    }

    /// Tells a schema from the same one after a migration.
    public static func fingerprint(_ connection: inout Connection) throws(DatabaseError) -> String {
        try connection.transaction(reading) { connection throws(DatabaseError) in
            try connection.query("SELECT \(MigrationScript.fingerprint)").value()
        }
    }

    /// Reads what was applied.
    func state(_ connection: inout Connection) throws(DatabaseError) -> SchemaState {
        var state = SchemaState()
        state.rolesExist = try Grants.rolesExist(&connection)
        let tables = try tables(&connection)
        state.table = tables.first
        state.exists = tables.contains("migration")
        guard state.exists else { return state }
        state.versions = try connection.query(
            "SELECT version, name, checksum, oldest_daemon FROM tokenkeeper.migration ORDER BY version"
        ).decode { row throws(DatabaseError) in
            SchemaState.AppliedVersion(
                version: try row.read(), name: try row.read(), checksum: try row.read(),
                oldestDaemon: Version(try row.read(String.self)) ?? daemon)
        }
        guard tables.contains("repeatable") else { return state }
        state.files = try connection.query("SELECT name, checksum, release FROM tokenkeeper.repeatable").decode {
            row throws(DatabaseError) in
            SchemaState.AppliedFile(
                name: try row.read(), checksum: try row.read(), release: Version(try row.read(String.self)) ?? daemon)
        }
        state.fingerprint = try connection.query("SELECT \(MigrationScript.fingerprint)").value()
        return state
    }

    /// Which of these tables the schema has: `migration` and `repeatable`, and two that it has had from the first file on, released or not.
    ///
    /// By name and not by to_regclass, which needs rights to the schema: a role without them gets an error that says so.
    private func tables(_ connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query(
            """
            SELECT tablename::text FROM pg_catalog.pg_tables
            WHERE schemaname = 'tokenkeeper' AND tablename IN ('ledger', 'topic', 'migration', 'repeatable') ORDER BY tablename
            """
        ).values()
    }

    /// The SHA-256 of each file, in hex, by name. The server computes it: this binary has no other use for SHA-256.
    func checksums(_ connection: inout Connection) throws(DatabaseError) -> [String: String] {
        let named =
            files.versions.map { ($0.file, $0.sql) } + (files.repeatables + [files.grants]).map { ($0.name, $0.sql) }
        let sums = try connection.query(
            "SELECT encode(sha256(convert_to(t.sql, 'UTF8')), 'hex') FROM unnest($1) WITH ORDINALITY AS t (sql, position) ORDER BY t.position",
            [.texts(named.map(\.1))]
        ).values(String.self)
        return Dictionary(zip(named.map(\.0), sums)) { first, _ in first }
    }
}
