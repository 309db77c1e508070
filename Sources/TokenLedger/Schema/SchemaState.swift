/// What stands between a binary and a database's schema.
public enum SchemaError: Error, Equatable, CustomStringConvertible {
    /// An applied migration differs from the one in this binary.
    case edited(version: Int, name: String)
    /// The schema has gone on to where this daemon cannot follow.
    case daemonTooOld(needed: Version, this: Version)
    /// Migrations of this binary have not been applied. (Only for those that do not apply them.)
    case notMigrated(missing: Int)

    public var description: String {
        switch self {
        case .edited(let version, let name):
            "migration \(version) (\(name)) was applied from a file that differs from the one in this tokenkeeperd; "
                + "an applied migration is never edited: install the tokenkeeperd that applied it, or add a new migration"
        case .daemonTooOld(let needed, let this):
            "the database was migrated for tokenkeeperd \(needed) or newer, and this is \(this): install a newer one"
        case .notMigrated(let missing):
            "\(missing) \(missing == 1 ? "migration has" : "migrations have") not been applied to this database: run `tokenkeeperd migrate`"
        }
    }
}

/// The decision about migrations, as a pure value.
struct SchemaState {
    struct Applied: Equatable {
        var version: Int
        var checksum: String
        var oldestDaemon: Version
    }

    /// What remains to be applied, in order.
    ///
    /// A migration that this binary does not know is no reason to refuse: its own declaration decides, so that a daemon
    /// can be rolled back while its schema stays.
    static func pending(
        applied: [Applied], available: [Migration], checksums: [Int: String], daemon: Version
    ) throws(SchemaError) -> [Migration] {
        if let needed = applied.map(\.oldestDaemon).max(), daemon < needed {
            throw .daemonTooOld(needed: needed, this: daemon)
        }
        let appliedChecksums = Dictionary(uniqueKeysWithValues: applied.map { ($0.version, $0.checksum) })
        for migration in available {
            if let checksum = appliedChecksums[migration.version], checksum != checksums[migration.version] {
                throw .edited(version: migration.version, name: migration.name)
            }
        }
        return available.filter { appliedChecksums[$0.version] == nil }
    }
}
