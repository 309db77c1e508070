/// Applies migrations: forward only, each in a transaction, under a lock, with checksums.
public struct Migrator {
    private let migrations: [Migration]
    private let daemon: Version

    /// - Parameters:
    ///   - migrations: In order of their versions.
    ///   - daemon: The version of this daemon, against which the migrations' declarations are held.
    public init(_ migrations: [Migration] = Migration.embedded, daemon: Version) {
        self.migrations = migrations
        self.daemon = daemon
    }

    /// Applies what is missing. Two migrators at once are harmless: the second finds nothing left to do.
    ///
    /// - Parameter tell: Called after each migration that was applied.
    public func migrate(_ connection: inout Connection, report: (Migration) -> Void) throws {
        while let applied = try applyNext(&connection) { report(applied) }
    }

    /// Two migrators may both begin to make the schema, when there is no table yet to lock: one of them meets a name that the other has
    /// just taken, and begins again.
    private func applyNext(_ connection: inout Connection) throws -> Migration? {
        // Where nothing is missing no lock is needed, nor the right to take it.
        if try pending(&connection).isEmpty { return nil }
        let isFirst = try !schemaExists(&connection)
        do {
            return try applyNextLocked(&connection)
        } catch let error as DatabaseError where isFirst && Self.nameTaken.contains(error.sqlState ?? "") {
            // If it still is not there, something else has the name.
            guard try schemaExists(&connection) else { throw error }
            return try applyNextLocked(&connection)
        }
    }

    /// unique_violation (in the catalog), duplicate_object, duplicate_schema, duplicate_table, duplicate_function.
    private static let nameTaken: Set<String> = ["23505", "42710", "42P06", "42P07", "42723"]

    private func applyNextLocked(_ connection: inout Connection) throws -> Migration? {
        do {
            try connection.run(
                """
                BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
                SET LOCAL statement_timeout = 0;
                SET LOCAL lock_timeout = '60s';
                SET LOCAL search_path = pg_catalog, pg_temp;
                """)
            if try schemaExists(&connection) {
                try connection.run("\(DrainLock.migration); SET LOCAL lock_timeout = '5s'")
            }
            guard let next = try pending(&connection).first else {
                connection.rollback()
                return nil
            }
            // On a ledger of many millions it may take as long as it takes.
            try connection.run(next.sql, patience: .seconds(86_400))
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.migration (version, name, checksum, oldest_daemon)
                VALUES ($1, $2, encode(sha256(convert_to($3, 'UTF8')), 'hex'), $4)
                """,
                [
                    .int4(Int32(next.version)), .text(next.name), .text(next.sql),
                    .text(next.oldestDaemon.description),
                ])
            try connection.commit()
            return next
        } catch {
            connection.rollback()
            throw error
        }
    }

    /// Whether a daemon of this version may work on this schema.
    ///
    /// - Throws: `SchemaError` if not, or `DatabaseError`.
    public func check(_ connection: inout Connection) throws {
        let missing = try pending(&connection).count
        if missing > 0 { throw SchemaError.notMigrated(missing: missing) }
    }

    /// By name and not by to_regclass, which needs rights to the schema: a role without them is told of that.
    private func schemaExists(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            "SELECT FROM pg_catalog.pg_tables WHERE schemaname = 'tokenkeeper' AND tablename = 'migration'"
        ).count > 0
    }

    private func pending(_ connection: inout Connection) throws -> [Migration] {
        var applied: [SchemaState.Applied] = []
        if try schemaExists(&connection) {
            let rows = try connection.query("SELECT version, checksum, oldest_daemon FROM tokenkeeper.migration")
            for row in 0..<rows.count {
                applied.append(
                    SchemaState.Applied(
                        version: Int(rows.integer(row, 0) ?? 0), checksum: rows.text(row, 1) ?? "",
                        oldestDaemon: Version(rows.text(row, 2) ?? "") ?? daemon))
            }
        }
        let checksums = try connection.query(
            "SELECT encode(sha256(convert_to(t.sql, 'UTF8')), 'hex') FROM unnest($1) WITH ORDINALITY AS t (sql, position) ORDER BY t.position",
            [.texts(migrations.map(\.sql))])
        var found: [Int: String] = [:]
        for (row, migration) in migrations.enumerated() { found[migration.version] = checksums.text(row, 0) }
        return try SchemaState.pending(
            applied: applied, available: migrations, checksums: found, daemon: daemon)
    }
}
