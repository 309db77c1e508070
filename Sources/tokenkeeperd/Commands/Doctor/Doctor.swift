internal import ArgumentParser
internal import Glibc
internal import TokenLedger

struct Doctor: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Check this machine, the database and the server, and print the command that fixes each problem.",
        discussion: """
            Changes nothing. Needs the rights of tokenkeeper_reader, tokenkeeper_operator or tokenkeeper_daemon; a \
            check that needs more says so and is skipped. Root can read the credentials; a login with pg_monitor sees \
            the transactions of all roles and the disk. Commands that end with a semicolon are for psql, as a \
            superuser or the owner of the schema. Exits with 1 if there is something to fix.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print JSON.")
    var json = false

    func run() throws {
        Signals.unblock()
        let configuration: Configuration
        do {
            configuration = try options.read()
            options.wipePassword()
        } catch {
            for problem in error.problems { ConfigurationOptions.complain(problem) }
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        var findings = MachineChecks(
            configuration: configuration, credentialFolders: options.credentialFolders
        ).findings
        var failure: DatabaseError?
        do {
            var connection = try configuration.connectLikeService(writes: false)
            findings += try databaseFindings(configuration, on: &connection)
        } catch {
            failure = error
            findings.append(
                Finding(.problem, "PostgreSQL", "\(error)", fixedBy: ["tokenkeeperd check-config --online"]))
        }
        print(json ? try JSONOutput.array(findings) : DoctorText.text(findings, .ofOutput))
        if let failure { throw ExitCode(ExitStatus(failure).rawValue) }
        if findings.contains(where: { $0.grade == .problem }) {
            throw ExitCode(ExitStatus.somethingToFix.rawValue)
        }
    }

    private func databaseFindings(
        _ configuration: Configuration, on connection: inout Connection
    ) throws(DatabaseError) -> [Finding] {
        let schema = try SchemaCheck.finding(daemon: Daemon.version, on: &connection)
        var findings = [schema.finding]
        // Without the schema, the other checks would only repeat that.
        if !schema.fits { return findings }
        let running = try RunningSettings(on: &connection)
        findings += running.findings(own: configuration.chosen)
        for check in DatabaseCheck.all(lockTimeout: running.lockTimeout(own: configuration.lockTimeout)) {
            findings += try check.findings(on: &connection)
        }
        findings += try LockCheck.findings(on: &connection) { sleep(1) }
        findings.append(try ClockCheck.finding(on: &connection))
        findings.append(try DiskCheck.finding(on: &connection))
        for (topic, database) in try KnownTopics.moved(on: &connection) {
            findings.append(
                Finding(
                    .note, "map", "\(topic) has moved to \(database), and the move has not ended",
                    fixedBy: ["tokenkeeperd move \(topic) --to \(database) --end"]))
        }
        if let strays = try StrayTopics.warning(configuration.values, on: &connection) {
            findings.append(Finding(.problem, "map", strays, fixedBy: ["tokenkeeperd map"]))
        }
        return findings
    }
}
