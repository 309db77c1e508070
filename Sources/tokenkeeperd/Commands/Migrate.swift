internal import ArgumentParser
internal import TokenLedger

struct Migrate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Create or upgrade the schema tokenkeeper.",
        discussion: """
            Works in one transaction. If all six roles exist, it also renews their rights. Run it as the role that \
            owns or will own the schema, which may CREATE in the database and is not a superuser; or as a member of \
            that role, with --owner. Connect to PostgreSQL itself, not through a pooler.
            """)

    @OptionGroup var options: ConfigurationOptions

    @OptionGroup var owner: OwnerOption

    @Flag(help: "Also create missing roles, as `grants` does. The login needs CREATEROLE; the owner loses it.")
    var grants = false

    @Flag(help: "Only show what would be applied.")
    var dryRun = false

    @Flag(help: "Only print the SQL, for psql, as one transaction.")
    var print = false

    func validate() throws {
        if dryRun && print { throw ValidationError("--dry-run and --print exclude each other") }
    }

    func run() throws {
        Signals.unblock()
        try options.load().withNamedDatabase { connection in
            let migrator = Migrator(daemon: Daemon.version)
            if print {
                let script = try migrator.script(&connection, createsRoles: grants, owner: owner.owner)
                Swift.print(script ?? "-- The schema is up to date.\n", terminator: "")
            } else if dryRun {
                Swift.print(connection.name)
                Swift.print(
                    try migrator.plan(&connection, createsRoles: grants).lines("would apply").joined(separator: "\n"))
            } else {
                if grants { try owner.createRoles(on: &connection) }
                try owner.assume(on: &connection)
                let plan = try migrator.migrate(&connection, createsRoles: grants) { _ in }
                Swift.print(plan.lines("applied").joined(separator: "\n"))
                if grants { try owner.takeRoleCreation(on: &connection) }
            }
        }
    }
}
