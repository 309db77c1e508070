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
        subcommands: [
            Run.self, Migrate.self, GrantRoles.self, SweepOnce.self, ShowStatus.self,
            CampaignCommand.self, TopicCommand.self, ChannelCommand.self, Explain.self, Held.self, Reinstate.self,
            Rejected.self, Forget.self,
            Attach.self,
            BackfillTable.self,
            ListAttachments.self, Detach.self, Withdraw.self, Import.self,
            CheckConfig.self, Doctor.self, ShowMap.self, MoveCommand.self, RouterCommand.self,
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
