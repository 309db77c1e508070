import LedgerTestSupport

extension TestDatabase {
    /// Runs a command of tokenkeeperd to its end, as a person who logs in with this role.
    func command(
        _ arguments: String..., as user: String, settings: [String] = [], environment: [String: String] = [:]
    ) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program] + arguments + settings.flatMap { ["--set", $0] },
            environment: environment.merging(["TOKENKEEPER_DATABASE_URL": url(user: user)]) { $1 })
    }

    /// Starts a daemon and waits for its first heartbeat.
    func daemon(_ settings: [String] = []) throws -> DaemonProcess {
        let daemon = try DaemonProcess(url(), settings: settings)
        try eventually("it is alive") {
            try psql("SELECT live_daemons FROM tokenkeeper.status") == "1"
        }
        return daemon
    }
}
