internal import ArgumentParser
internal import TokenLedger

struct GrantRoles: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "grants",
        abstract:
            "Create the roles tokenkeeper_sender, _app, _reader, _operator and _daemon, and grant each its rights.",
        discussion: """
            As often as one likes. Run it as the owner of the schema; that role needs CREATEROLE where roles are missing, \
            or else let a DBA run what --print shows. Then grant the roles to your own, as in \
            GRANT tokenkeeper_daemon TO my_daemon.
            """)

    @OptionGroup var options: ConfigurationOptions

    @OptionGroup var owner: OwnerOption

    @Flag(help: "Print the SQL and touch nothing.")
    var print = false

    func run() throws {
        Signals.unblock()
        if print {
            Swift.print(Grants.sql, terminator: "")
            return
        }
        try options.load().withNamedDatabase { connection in
            try owner.assume(on: &connection)
            try Migrator(daemon: Daemon.version).check(&connection)
            try Grants.apply(&connection)
            Swift.print("the roles are there, and have their rights")
        }
    }
}
