internal import ArgumentParser
internal import TokenLedger

/// Makes and checks routers: databases that lead to all shards.
struct RouterCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "router",
        abstract: "Make or check a router: a database that leads to several shards.",
        discussion: """
            A shard is a complete database with a daemon of its own. A router has no data: its schema tokenkeeper has the same names, \
            and leads to the shards. The page how-to/shard.md says how to set them up.
            """,
        subcommands: [Migrate.self, Check.self])

    struct MapOption: ParsableArguments {
        @Option(
            help: "The shard map: a TOML file with shards = [\"host=… dbname=…\", …], in the order of their numbers.")
        var shards: String

        @Option(help: "The role to connect to the shards as. [default: libpq's]")
        var shardUser: String?

        /// Reads the map. Prints the problem, if there is one, and exits.
        func router() throws -> Router {
            do {
                return Router(to: try ShardMap(file: shards), shardUser: shardUser, daemon: Daemon.version)
            } catch {
                for problem in error.problems { ConfigurationOptions.complain(problem) }
                throw ExitCode(ExitStatus.configuration.rawValue)
            }
        }
    }

    struct Migrate: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Tell each shard its number, and create or renew the router's schema.",
            discussion: """
                Migrate the shards first, with this release. On a shard that does not know its number yet, this needs the rights of the \
                schema's owner. On the router it needs a superuser, because PL/Proxy does. It can be repeated, and should be after each \
                upgrade, after a change of the map, and after a login was added to a role.
                """)

        @OptionGroup var options: ConfigurationOptions

        @OptionGroup var map: MapOption

        @Flag(
            help: "Print the SQL for the router, for psql, as one transaction. Changes nothing, also not on the shards."
        )
        var print = false

        func run() throws {
            Signals.unblock()
            let router = try map.router()
            try options.load().withNamedDatabase { connection in
                if print {
                    Swift.print(try router.print(&connection), terminator: "")
                } else {
                    Swift.print(
                        try router.migrate(&connection) ? "the router leads to all shards" : "the router is up to date")
                }
            }
        }
    }

    struct Check: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Compare the router, the map and all shards: numbers, versions and roles.",
            discussion: """
                Prints what is wrong, a line each, and then exits with status 1. Connects to each shard, with the rights of \
                tokenkeeper_reader there.
                """)

        @OptionGroup var options: ConfigurationOptions

        @OptionGroup var map: MapOption

        func run() throws {
            Signals.unblock()
            let router = try map.router()
            try options.load().withConnection(writes: false, likeService: false) { connection in
                let findings = try router.check(&connection)
                if findings.isEmpty { return print("the router and all shards agree") }
                print(findings.joined(separator: "\n"))
                throw ExitCode(ExitStatus.somethingToFix.rawValue)
            }
        }
    }
}
