internal import ArgumentParser
internal import CLinux
internal import FoundationEssentials
internal import Glibc
internal import TokenLedger
internal import TokenModel

struct Run: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Run the daemon: drain, record, sweep, and send if credentials are configured.",
        discussion: """
            While PostgreSQL is unavailable, or its schema does not fit, it waits.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Apply missing migrations first. The role must own the schema.")
    var migrate = false

    private static var timing: Timing {
        #if DEBUG
            if let fraction = ProcessInfo.processInfo.environment["TEST_TIMING"].flatMap(Double.init),
                (0.01...1).contains(fraction)
            {
                return Timing(fraction: fraction)
            }
        #endif
        return .production
    }

    func run() throws {
        // Before any secret is in memory: forbid core dumps, and access by other processes of this user.
        _ = tk_forbid_dumps()
        let configuration = try options.load(toLog: true)
        if !configuration.address.isGiven {
            ConfigurationOptions.complain(Configuration.noDatabase)
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        options.warnOfRuntimeDirectories(of: configuration)
        let tokens = ProviderTokens(keptIn: configuration.providerTokenDirectory, logger: configuration.logger())
        let credentials = options.credentialSources(of: configuration, tokens)
        let status = Daemon(
            options: options, configuration: configuration, credentials: credentials,
            migrates: migrate, timing: Self.timing
        ).run()
        // Not exit(3), which cleans up OpenSSL: a thread that is still connecting may be inside it, and would crash.
        _exit(status.rawValue)
    }
}
