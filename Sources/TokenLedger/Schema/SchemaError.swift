/// Why a binary cannot work with a database's schema, or cannot migrate it.
public enum SchemaError: Error, Equatable, CustomStringConvertible {
    /// The schema was made by a version that is in no release.
    case unreleased(version: Int, name: String)
    /// The schema has this table of ours, but does not say which versions made it.
    case unrecorded(table: String)
    /// An applied version differs from the file in this binary.
    case edited(version: Int, name: String)
    /// The schema has moved on, and this daemon cannot work with it.
    case daemonTooOld(needed: Version, this: Version)
    /// The functions and views are those of a newer release, and this binary would have to replace them.
    case functionsNewer(release: Version, this: Version)
    /// Versions or repeatables of this binary have not been applied. Only for callers that do not apply them.
    case notMigrated(MigrationPlan)
    /// A version drops an object that others have built on. The message names what they have built.
    case builtUpon(String)
    /// The schema belongs to another role than the one that migrates.
    case notOwner(owner: String, role: String)

    public var description: String {
        switch self {
        case .unreleased(let version, let name):
            "version \(version) (\(name)) of this database's schema is in no release of tokenkeeperd, so the schema cannot be upgraded: "
                + Self.startAnew
        case .unrecorded(let table):
            "this database has the table tokenkeeper.\(table) but no record of the version that made it: no release of tokenkeeperd did, or the "
                + "record was not restored, and the schema cannot be upgraded: " + Self.startAnew
        case .edited(let version, let name):
            "version \(version) (\(name)) of the schema was applied from a file that differs from the one in this tokenkeeperd; "
                + "a released version is never edited: install the tokenkeeperd that applied it"
        case .daemonTooOld(let needed, let this):
            "the database was migrated for tokenkeeperd \(needed) or newer, and this is \(this): install a newer one"
        case .functionsNewer(let release, let this):
            "the functions of this schema are those of tokenkeeperd \(release), and this is \(this): use \(release) or newer"
        case .notMigrated(let plan):
            "\(plan.missing) not been applied to this database: run `tokenkeeperd migrate`"
        case .builtUpon(let message):
            "nothing was migrated, because someone has built on an object that must be replaced: \(message); "
                + "drop that, migrate, and create it again"
        case .notOwner(let owner, let role):
            "nothing was migrated, because the schema tokenkeeper belongs to the role \(owner), and \(role) would own the functions that it creates: "
                + "connect as \(owner), or run `tokenkeeperd migrate \(ShellWord.option("--owner", owner))`"
        }
    }

    private static let startAnew =
        "use a new database, or DROP SCHEMA tokenkeeper CASCADE (which deletes its data), and run `tokenkeeperd migrate`"
}
