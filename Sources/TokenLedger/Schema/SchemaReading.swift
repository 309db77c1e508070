extension Migrator {
    /// Whether the schema's table of versions exists. By name and not by to_regclass, which needs rights to the schema: a role without
    /// them gets an error that says so.
    func schemaExists(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try exists("migration", &connection)
    }

    private func exists(_ table: String, _ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            "SELECT FROM pg_catalog.pg_tables WHERE schemaname = 'tokenkeeper' AND tablename = $1", [.text(table)]
        ).count > 0
    }

    /// Reads what was applied.
    func state(_ connection: inout Connection) throws(DatabaseError) -> SchemaState {
        var state = SchemaState()
        state.rolesExist = try Grants.rolesExist(&connection)
        guard try schemaExists(&connection) else { return state }
        let versions = try connection.query(
            "SELECT version, name, checksum, oldest_daemon FROM tokenkeeper.migration ORDER BY version")
        state.versions = (0..<versions.count).map { row in
            SchemaState.AppliedVersion(
                version: Int(versions.integer(row, 0) ?? 0), name: versions.text(row, 1) ?? "",
                checksum: versions.text(row, 2) ?? "", oldestDaemon: Version(versions.text(row, 3) ?? "") ?? daemon)
        }
        guard try exists("repeatable", &connection) else { return state }
        let files = try connection.query("SELECT name, checksum, release FROM tokenkeeper.repeatable")
        state.files = (0..<files.count).map { row in
            SchemaState.AppliedFile(
                name: files.text(row, 0) ?? "", checksum: files.text(row, 1) ?? "",
                release: Version(files.text(row, 2) ?? "") ?? daemon)
        }
        state.fingerprint = try connection.query("SELECT \(MigrationScript.fingerprint)").text(0, 0)
        return state
    }

    /// The SHA-256 of each file, in hex, by name. The server computes it: this binary has no other use for SHA-256.
    func checksums(_ connection: inout Connection) throws(DatabaseError) -> [String: String] {
        let named =
            files.versions.map { ($0.file, $0.sql) } + (files.repeatables + [files.grants]).map { ($0.name, $0.sql) }
        let rows = try connection.query(
            "SELECT encode(sha256(convert_to(t.sql, 'UTF8')), 'hex') FROM unnest($1) WITH ORDINALITY AS t (sql, position) ORDER BY t.position",
            [.texts(named.map(\.1))])
        var found: [String: String] = [:]
        for (row, file) in named.enumerated() { found[file.0] = rows.text(row, 0) }
        return found
    }
}
