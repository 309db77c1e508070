internal import ArgumentParser
internal import TokenLedger

struct Migrate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Create or upgrade the schema tokenkeeper.",
        discussion: """
            Forward only, each migration in a transaction of its own. Run it as the role that is to own the schema: one that \
            may CREATE in the database, and no superuser; or as a member of it, with --owner. Where the roles exist, their \
            rights are renewed. Connect to PostgreSQL itself, not through a pooler.
            """)

    @OptionGroup var options: ConfigurationOptions

    @OptionGroup var owner: OwnerOption

    @Flag(help: "Do afterwards what `tokenkeeperd grants` does.")
    var grants = false

    func run() throws {
        Signals.unblock()
        try options.load().withNamedDatabase { connection in
            try owner.assume(on: &connection)
            var applied = 0
            try Migrator(daemon: Daemon.version).migrate(&connection) { migration in
                applied += 1
                print("applied \(migration.version) \(migration.name)")
            }
            if applied == 0 { print("the schema is up to date") }
            let rolesExist = try Grants.rolesExist(&connection)
            if grants || (rolesExist && applied > 0) {
                try Grants.apply(&connection)
                print("the roles are there, and have their rights")
            } else if !rolesExist {
                print("next: `tokenkeeperd grants` makes the roles")
            }
        }
    }
}
