internal import ArgumentParser
internal import CLinux
internal import Glibc

struct Run: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Run the daemon: drain, record, sweep.",
        discussion: """
            SIGTERM and SIGINT finish the batches in hand and leave with 0; SIGUSR1 sweeps now; SIGHUP reads the \
            configuration anew. While PostgreSQL is away the daemon waits for it. It leaves with 78 when the schema does \
            not fit. It speaks sd_notify(3), watchdog included.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Apply what migrations are missing first; this role must then own the schema.")
    var migrate = false

    func run() throws {
        // Before there is a secret in memory: no core dump of it, and no other process of this user looks into it.
        _ = tk_forbid_dumps()
        let configuration = try options.load()
        let credentials = try options.loadCredentials(of: configuration)
        let status = Daemon(
            options: options, configuration: configuration, credentials: credentials, migrates: migrate
        ).run()
        // A thread that was connecting may still be inside OpenSSL, and would not survive that it is cleared away at exit(3).
        _exit(status.rawValue)
    }
}
