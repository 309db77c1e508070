internal import ArgumentParser
internal import Glibc
internal import TokenLedger

/// The command line.
@main
struct Tokenkeeperd: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "tokenkeeperd",
        abstract: "Keeps the device tokens of an APNs provider clean, inside PostgreSQL.",
        version: Daemon.version.description,
        subcommands: [
            Run.self, Migrate.self, GrantRoles.self, SweepOnce.self, ShowStatus.self,
            CampaignCommand.self, ChannelCommand.self, Explain.self, Held.self, Reinstate.self, Rejected.self,
            Attach.self,
            BackfillTable.self,
            ListAttachments.self, Detach.self, Withdraw.self, Import.self,
            CheckConfig.self, Doctor.self,
        ],
        defaultSubcommand: nil)

    static func main() {
        Signals.block()
        let arguments = Array(CommandLine.arguments.dropFirst())
        do {
            var command = try parseAsRoot(arguments)
            try command.run()
            try StandardOutput.flush()
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
