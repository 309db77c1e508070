internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Queues the registrations, or the feedback of APNs, that a file has.
struct Import: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "import",
        abstract: "Import registrations or feedback from a file.",
        discussion: """
            Queues each row for the running daemons: as a registration, or as a result with --feedback. A row that \
            cannot be understood goes to a file, with its line and the cause: fix it there, and import that file. To \
            continue an interrupted import, repeat the command. Importing a file twice changes nothing. Needs the \
            rights of tokenkeeper_app, and for feedback also those of tokenkeeper_sender.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Argument(help: ArgumentHelp("The file, or - for standard input.", valueName: "file"))
    var file: String

    @OptionGroup var reading: ImportOptions

    @Option(help: "The file for refused rows. [default: the file's name with .rejected]")
    var rejects: String?

    @Flag(help: "Only read the file, and print the summary and the first refused rows.")
    var dryRun = false

    @Flag(help: "Begin again instead of continuing an earlier import of the file.")
    var restart = false

    func validate() throws {
        if file == "-", rejects == nil, !dryRun {
            throw ValidationError("Standard input needs --rejects FILE, for the rows that are refused.")
        }
        if file == "-", reading.asOf == nil {
            throw ValidationError("Standard input needs --as-of TIME, for rows without a time.")
        }
    }

    func run() throws {
        let configuration = try options.load()
        let stop = ShutdownRequest.bySignal()
        let role = reading.feedback ? "tokenkeeper_app and tokenkeeper_sender" : "tokenkeeper_app"
        do {
            let input = try ImportInput(file)
            guard input.lock() || dryRun else {
                throw ImportProblem("another process imports \(file): wait until it has finished")
            }
            guard let asOf = input.modified ?? (reading.asOf != nil ? .now : nil) else {
                throw ImportProblem("\(file) is no file: give --as-of TIME, for rows without a time")
            }
            try configuration.withLedger(as: role) { connection in
                try ImportSource.checkRights(reading.queue, on: &connection)
                var rules = try reading.rules(asOf: asOf, now: .now, in: reading.zone(on: &connection))
                rules.holdsAll = try ServerEncoding(of: &connection).holdsAll
                let run = ImportRun(
                    file: file, reading: reading, rules: rules, rejects: rejects ?? file + ".rejected",
                    isDryRun: dryRun, stop: stop.request)
                let outcome = try run.perform(input, restart: restart, on: &connection)
                print(outcome.lines.joined(separator: "\n"))
                if let problem = outcome.problem { throw ImportProblem("\(file): \(problem.description)") }
                if !outcome.isFinished { throw ExitCode(ExitStatus.failed.rawValue) }
                if outcome.refused > 0 { throw ExitCode(ExitStatus.somethingToFix.rawValue) }
            }
        } catch let problem as ImportProblem {
            ConfigurationOptions.complain(HistoryText.plain(problem.description))
            throw ExitCode(ExitStatus.failed.rawValue)
        }
        withExtendedLifetime(stop) {}
    }
}
