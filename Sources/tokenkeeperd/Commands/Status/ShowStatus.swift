internal import ArgumentParser
internal import Glibc
internal import TokenLedger

struct ShowStatus: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "status",
        abstract: "Print the view tokenkeeper.status: queue, tokens, outbox and warnings.",
        discussion: """
            Needs the rights of tokenkeeper_reader. Works on a standby.

            With --check, it is a plug-in for Nagios and Icinga: one line, performance data, and the exit status 0 \
            (OK), 1 (WARNING), 2 (CRITICAL: a person must act now) or 3 (UNKNOWN: PostgreSQL does not respond, or \
            there is no schema).
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print JSON, with ages in seconds.")
    var json = false

    @Flag(help: "Check as a monitoring plug-in does.")
    var check = false

    @Flag(help: "Draw the status on the terminal repeatedly, until q or Ctrl-C.")
    var watch = false

    @Option(help: "The seconds between two updates of --watch, 1 to 3600.")
    var interval = 2

    func validate() throws {
        if [json, check, watch].filter(\.self).count > 1 {
            throw ValidationError("Give one of --json, --check and --watch.")
        }
        if !(1...3600).contains(interval) { throw ValidationError("--interval is \(interval), expected 1 to 3600.") }
        if watch, isatty(STDOUT_FILENO) == 0 {
            throw ValidationError(
                "--watch draws on a terminal, and the output is none. For a program, use --json or --check.")
        }
    }

    func run() throws {
        if check { return try runCheck() }
        if watch { return StatusWatch(configuration: try options.load(), interval: .seconds(interval)).run() }
        Signals.unblock()
        let configuration = try options.load()
        try configuration.withLedger(writes: false, as: "tokenkeeper_reader") { connection in
            let report = try Self.report(configuration, on: &connection)
            if json { return print(report.json) }
            print(
                ([HistoryText.plain(connection.name)] + StatusText.lines(report, Color.ofOutput)).joined(
                    separator: "\n"))
        }
    }

    private static func report(
        _ configuration: Configuration, on connection: inout Connection
    ) throws(DatabaseError) -> StatusReport {
        let strays = try StrayTopics.warning(configuration.values, on: &connection)
        return try StatusReport(on: &connection, with: [strays].compactMap(\.self))
    }

    /// Whatever goes wrong is UNKNOWN: an exit status above 3 has no meaning for a monitoring system, which reads standard output only.
    private func runCheck() throws {
        Signals.unblock()
        let result: StatusCheck
        do {
            let configuration = try options.read()
            options.wipePassword()
            var connection = try configuration.connectLikeService(writes: false)
            try Migrator(daemon: Daemon.version).check(&connection)
            result = StatusCheck(try Self.report(configuration, on: &connection))
        } catch let error as ConfigurationError {
            result = StatusCheck(unknown: error.problems.joined(separator: "; "))
        } catch {
            result = StatusCheck(unknown: "\(error)")
        }
        print(result.line)
        if result.state != .ok { throw ExitCode(result.state.rawValue) }
    }
}
