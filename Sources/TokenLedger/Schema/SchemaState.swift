/// What a database says about its schema.
struct SchemaState {
    struct AppliedVersion: Equatable {
        var version: Int
        var name: String
        var checksum: String
        var oldestDaemon: Version
    }

    struct AppliedFile: Equatable {
        var name: String
        var checksum: String
        var release: Version
    }

    /// Whether there is a table of versions.
    var exists = false
    var versions: [AppliedVersion] = []
    /// A table of ours; nil if there is none.
    var table: String?
    /// Nil if the schema has no table for them, which no release ever made.
    var files: [AppliedFile]?
    /// Whether all roles exist.
    var rolesExist = false
    /// A digest of all of it, by the server.
    var fingerprint: String?

    /// Decides what to apply.
    ///
    /// A version that this binary does not know is no reason to refuse: its own declaration decides, so that a daemon can be rolled back
    /// while its schema stays.
    ///
    /// - Parameters:
    ///   - checksums: Of all files of `wanted`, by name.
    ///   - createsRoles: Whether grants are applied even if roles are missing.
    func plan(
        for wanted: SchemaFiles, checksums: [String: String], daemon: Version, createsRoles: Bool = false
    ) throws(SchemaError) -> MigrationPlan {
        try refuse(wanted, checksums, daemon)
        let known = Set(versions.map(\.version))
        let pending = wanted.versions.filter { !known.contains($0.version) }
        let applied = Dictionary(uniqueKeysWithValues: (files ?? []).map { ($0.name, $0) })
        if let newest = applied.values.map(\.release).max(), daemon < newest {
            guard pending.isEmpty, !createsRoles else { throw .functionsNewer(release: newest, this: daemon) }
            return MigrationPlan()
        }
        let grants = wanted.grants.name
        let gone = Set(applied.keys).subtracting(wanted.repeatables.map(\.name)).subtracting([grants])
        let changed = wanted.repeatables.map(\.name).filter { applied[$0]?.checksum != checksums[$0] }
        var plan = MigrationPlan(versions: pending, differing: changed + gone.sorted())
        if !pending.isEmpty || !plan.differing.isEmpty { plan.repeatables = wanted.repeatables }
        if createsRoles || (rolesExist && (!plan.isEmpty || applied[grants]?.checksum != checksums[grants])) {
            plan.rights = .apply
        } else if !rolesExist {
            plan.rights = .rolesMissing
        }
        return plan
    }

    private func refuse(
        _ wanted: SchemaFiles, _ checksums: [String: String], _ daemon: Version
    ) throws(SchemaError) {
        // Versions and their record are applied in one transaction, but old files could be applied by psql.
        if versions.isEmpty, let table { throw .unrecorded(table: table) }
        let named = Dictionary(uniqueKeysWithValues: wanted.versions.map { ($0.version, $0) })
        for one in versions.sorted(by: { $0.version < $1.version }) {
            let isOurs = named[one.version].map { $0.name == one.name } ?? true
            if !isOurs || files == nil { throw .unreleased(version: one.version, name: one.name) }
        }
        if let needed = versions.map(\.oldestDaemon).max(), daemon < needed {
            throw .daemonTooOld(needed: needed, this: daemon)
        }
        for one in versions {
            guard let ours = named[one.version] else { continue }
            if checksums[ours.file] != one.checksum { throw .edited(version: one.version, name: one.name) }
        }
    }
}
