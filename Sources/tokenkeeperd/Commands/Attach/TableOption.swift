internal import ArgumentParser
internal import TokenLedger

/// The table that a command is about. The command connects as the table's owner: it executes what belongs to the table.
struct TableOption: ParsableArguments {
    @Argument(
        help: ArgumentHelp(
            "The table, with its schema if needed; or the name of an attachment.", valueName: "table"))
    var table: String

    /// Whose rights an error without rights asks for.
    private static let rights = "the table's owner, who is also a member of tokenkeeper_app"

    /// Runs a command as the table's owner, in a named database.
    func run(_ configuration: Configuration, _ work: (inout Connection) throws -> Void) throws {
        try configuration.withNamedDatabase(as: Self.rights) { connection in
            try Migrator(daemon: Daemon.version).check(&connection)
            try work(&connection)
        }
    }
}
