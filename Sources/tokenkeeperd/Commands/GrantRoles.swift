internal import ArgumentParser
internal import TokenLedger

struct GrantRoles: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "grants",
        abstract:
            "Create the roles tokenkeeper_sender, _app, _reader, _monitor, _operator and _daemon, with their rights.",
        discussion: """
            Can be repeated. Run it as an administrator who has CREATEROLE, with the schema's owner as --owner (the \
            owner loses CREATEROLE); or as the owner; or let a DBA run what --print shows. Then grant the roles to \
            your own, as in GRANT tokenkeeper_daemon TO my_daemon.
            """)

    @OptionGroup var options: ConfigurationOptions

    @OptionGroup var owner: OwnerOption

    @Flag(help: "Only print the SQL.")
    var print = false

    func run() throws {
        Signals.unblock()
        if print {
            Swift.print(Grants.sql, terminator: "")
            return
        }
        try options.load().withNamedDatabase { connection in
            try owner.createRoles(on: &connection)
            try owner.assume(on: &connection)
            try Grants.apply(&connection, daemon: Daemon.version)
            Swift.print("the roles exist and have their rights")
            try owner.takeRoleCreation(on: &connection)
        }
    }
}
