internal import ArgumentParser
internal import Glibc
internal import TokenLedger

/// The command line.
@main
struct Tokenkeeperd: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "tokenkeeperd",
        abstract: "Keeps the device tokens of an APNs provider clean, inside PostgreSQL.",
        discussion: """
            With several databases (map.file), --all before a command runs it on all of them at once, and --on NAME on \
            one: tokenkeeperd --all status. Each may take --time-limit (30s). The exit status is 0 only if all exit \
            with 0. Works for \(FleetArguments.commands.joined(separator: ", ")).
            """,
        version: Daemon.version.description,
        groupedSubcommands: [
            CommandGroup(name: "Daemon", subcommands: [Run.self, CheckConfig.self, Doctor.self]),
            CommandGroup(name: "Ledger", subcommands: [ShowStatus.self, Explain.self]),
            CommandGroup(
                name: "Sending", subcommands: [Send.self, CampaignCommand.self, TopicCommand.self, ChannelCommand.self]),
            CommandGroup(
                name: "Operator",
                subcommands: [
                    Held.self, Reinstate.self, Rejected.self, Forget.self, SweepOnce.self,
                ]),
            CommandGroup(
                name: "Table and file",
                subcommands: [
                    Attach.self, BackfillTable.self, ListAttachments.self, Detach.self, Import.self, Withdraw.self,
                ]),
            CommandGroup(name: "Setup", subcommands: [Migrate.self, GrantRoles.self, Uninstall.self]),
            CommandGroup(
                name: "Multi-database", subcommands: [ShowMap.self, MoveCommand.self, RouterCommand.self]),
        ],
        defaultSubcommand: nil)

    static func main() {
        Signals.block()
        let arguments = Array(CommandLine.arguments.dropFirst())
        do {
            if let fleet = try FleetArguments(arguments) {
                // One message about a wrong argument, and not one from each database.
                _ = try parseAsRoot(fleet.command)
                Signals.unblock()
                Glibc.exit(try FleetRun(fleet).run())
            }
            var command = try parseAsRoot(arguments)
            try command.run()
            try StandardOutput.flush()
        } catch let error as ConfigurationError {
            for problem in error.problems { ConfigurationOptions.complain(problem) }
            Glibc.exit(ExitStatus.configuration.rawValue)
        } catch {
            if let problem = StrayAddress.problem(insteadOf: fullMessage(for: error), arguments: arguments) {
                ConfigurationOptions.complain(problem)
                Glibc.exit(ExitStatus.usage.rawValue)
            }
            if let problem = UnknownCommand.problem(in: arguments[...], of: Self.self, named: "tokenkeeperd") {
                ConfigurationOptions.complain(problem)
                Glibc.exit(ExitStatus.usage.rawValue)
            }
            exit(withError: error)
        }
    }
}
