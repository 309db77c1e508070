internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Makes a database a router.
struct RouterCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "router",
        abstract: "Make a database a router: its functions run in the database of the topic.",
        subcommands: [MigrateRouter.self])

    struct MigrateRouter: ParsableCommand {
        static let configuration = CommandConfiguration(
            commandName: "migrate",
            abstract: "Create the functions of a router; again after the map or the release has changed.",
            discussion: """
                Needs map.file, PL/Proxy on the router's server, and a superuser's login to a database without a \
                ledger. Each database needs the logins tokenkeeper_router_app, tokenkeeper_router_sender and \
                tokenkeeper_router_reader.
                """)

        @OptionGroup var options: ConfigurationOptions

        @Flag(help: "Only print the SQL, for psql. Connects to nothing.")
        var print = false

        func run() throws {
            Signals.unblock()
            let configuration = try options.load()
            let map = try TopicMap(of: configuration)
            let script = try RouterScript(
                databases: map.databases, topics: map.topics, split: Array(map.splitByDevice), owners: map.owners)
            if print { return Swift.print("BEGIN;\n\(script.text)\nCOMMIT;") }
            try configuration.withNamedDatabase { connection in
                try script.apply(on: &connection)
                Swift.print("this database is a router for \(counted(map.databases.count, "database", "databases"))")
            }
        }
    }
}
