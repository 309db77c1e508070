/// Brings a schema to what this binary's files say: all that is missing or differs, in one transaction, under a lock.
public struct Migrator {
    let files: SchemaFiles
    let daemon: Version

    /// - Parameter daemon: The version of this daemon. It is recorded as the release of the functions, and compared with what versions declare.
    public init(_ files: SchemaFiles = .embedded, daemon: Version) {
        self.files = files
        self.daemon = daemon
    }

    /// Applies what is missing or differs. With two migrators at once, the second waits and then finds nothing to do.
    ///
    /// - Parameters:
    ///   - createsRoles: Whether missing roles are created. Otherwise rights are granted only if all roles exist.
    ///   - applied: Called once if something was applied.
    /// - Returns: What was applied.
    @discardableResult
    public func migrate(
        _ connection: inout Connection, createsRoles: Bool = false, applied: (MigrationPlan) -> Void
    ) throws -> MigrationPlan {
        // If nothing is missing, neither the lock nor the right to take it is needed.
        let (found, checksums) = try read(&connection)
        let idle = try found.plan(for: files, checksums: checksums, daemon: daemon, createsRoles: createsRoles)
        if idle.isEmpty { return idle }
        let done: MigrationPlan
        do {
            done = try applyLocked(&connection, createsRoles: createsRoles)
        } catch let error as DatabaseError where !found.exists && Self.nameTaken.contains(error.sqlState ?? "") {
            // Without a table there is nothing to lock: two migrators may both begin, and one meets a name that the other has just taken.
            // If the schema still does not exist, something else has the name.
            guard try read(&connection).state.exists else { throw error }
            done = try applyLocked(&connection, createsRoles: createsRoles)
        }
        if !done.isEmpty { applied(done) }
        return done
    }

    /// unique_violation (in the catalog), duplicate_object, duplicate_schema, duplicate_table, duplicate_function.
    private static let nameTaken: Set<String> = ["23505", "42710", "42P06", "42P07", "42723"]

    /// What `migrate` would apply now. Changes nothing.
    public func plan(_ connection: inout Connection, createsRoles: Bool = false) throws -> MigrationPlan {
        let (state, checksums) = try read(&connection)
        return try state.plan(for: files, checksums: checksums, daemon: daemon, createsRoles: createsRoles)
    }

    /// What `migrate` would run now, as a script for psql; nil if there is nothing to do. Changes nothing.
    ///
    /// - Parameter owner: The role that is to own the schema, if not the one that runs the script.
    public func script(_ connection: inout Connection, createsRoles: Bool = false, owner: String? = nil) throws
        -> String?
    {
        let (state, checksums) = try read(&connection)
        let plan = try state.plan(for: files, checksums: checksums, daemon: daemon, createsRoles: createsRoles)
        if plan.isEmpty { return nil }
        let script = MigrationScript(plan: plan, grants: files.grants, checksums: checksums, release: daemon)
        return script.text(for: state.fingerprint, owner: owner)
    }

    private func applyLocked(_ connection: inout Connection, createsRoles: Bool) throws -> MigrationPlan {
        do {
            return try connection.transaction(MigrationScript.transaction) {
                try apply(&$0, createsRoles: createsRoles)
            }
        } catch let error as DatabaseError where error.sqlState == "2BP01" {
            throw SchemaError.builtUpon(error.message)
        } catch let error as DatabaseError where error.sqlState == "55P03" {
            throw OpenTransactions.named(in: error, on: &connection)
        }
    }

    private func apply(_ connection: inout Connection, createsRoles: Bool) throws -> MigrationPlan {
        let checksums = try checksums(&connection)
        var found = try state(&connection)
        var plan = try found.plan(for: files, checksums: checksums, daemon: daemon, createsRoles: createsRoles)
        if plan.createsObjects { try SchemaOwner.check(on: &connection) }
        if found.exists, !plan.isEmpty {
            try connection.run(MigrationScript.lock)
            // Another migrator may have had the lock until now.
            found = try state(&connection)
            plan = try found.plan(for: files, checksums: checksums, daemon: daemon, createsRoles: createsRoles)
        }
        if plan.isEmpty { return plan }
        let script = MigrationScript(plan: plan, grants: files.grants, checksums: checksums, release: daemon)
        for statement in script.statements {
            // On a ledger of many millions it may take long.
            try connection.run(statement, patience: .seconds(86_400))
        }
        return plan
    }

    /// Whether a daemon of this version may work on this schema.
    ///
    /// - Returns: The schema's fingerprint.
    /// - Throws: `SchemaError` if not, or `DatabaseError`.
    @discardableResult
    public func check(_ connection: inout Connection) throws -> String? {
        let (state, checksums) = try read(&connection)
        var plan = try state.plan(for: files, checksums: checksums, daemon: daemon)
        // Rights are for `grants`, and a DBA may have granted them without a record.
        plan.rights = .keep
        if !plan.isEmpty { throw SchemaError.notMigrated(plan) }
        return state.fingerprint
    }
}
