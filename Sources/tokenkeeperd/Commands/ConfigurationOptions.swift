internal import ArgumentParser
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import TokenLedger
internal import TokenModel

/// The options that every command has.
struct ConfigurationOptions: ParsableArguments {
    @Option(help: "The configuration file. [default: /etc/tokenkeeperd/tokenkeeperd.toml, if it exists]")
    var config: String?

    @Option(
        help: "The database, as a libpq connection string. Put a password into a file instead.")
    var databaseURL: String?

    @Option(name: .customLong("set"), help: "One setting, as key=value. May be repeated.")
    var settings: [String] = []

    static let usualFile = "/etc/tokenkeeperd/tokenkeeperd.toml"

    /// Reads and checks everything. Prints all problems, if there are any, and exits.
    func load() throws -> Configuration {
        do {
            let configuration = try read()
            wipePassword()
            warnOfReadablePassword(in: configuration)
            warnOfReadableSecrets([configuration.address.passwordFile].compactMap { $0 })
            return configuration
        } catch {
            for problem in error.problems { Self.complain(problem) }
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
    }

    /// Reads and checks everything.
    func read() throws(ConfigurationError) -> Configuration {
        let environment = ProcessInfo.processInfo.environment
        let path = namedFile ?? Self.usualFile
        var file: (contents: [UInt8], name: String)?
        if namedFile != nil || FileManager.default.fileExists(atPath: path) {
            guard !StrayAddress.isLikely(path) else {
                throw ConfigurationError(["--config: expected a file; \(StrayAddress.advice)"])
            }
            guard let bytes = SecretBytes(contentsOf: path, limit: TOMLScanner.maximumSize) else {
                throw ConfigurationError(["\(path): cannot be read, or has more than 1 MiB"])
            }
            // Not wiped, and neither is a password in database_url: docs/how-to/connect-to-postgresql.md says so.
            file = (bytes.unprotected, path)
        }
        let flags = settings + (databaseURL.map { ["database_url=\($0)"] } ?? [])
        let credentials =
            if let folder = environment["CREDENTIALS_DIRECTORY"] {
                try DatabaseCredentials(handedOverIn: folder)
            } else if path == Self.usualFile {
                try DatabaseCredentials(ofServiceIn: DatabaseCredentials.folderOfService)
            } else {
                DatabaseCredentials()
            }
        return try Configuration(file: file, credentials: credentials, environment: environment, flags: flags)
    }

    /// Reads the files of the credentials for APNs. Prints all problems, if there are any, and exits.
    func loadCredentials(of configuration: Configuration) throws -> [LoadedCredential] {
        let handedOver = ProcessInfo.processInfo.environment["CREDENTIALS_DIRECTORY"].map { [$0 + "/apns_"] } ?? []
        var credentials: [LoadedCredential] = []
        var tokens = ProviderTokens()
        var problems: [String] = []
        for settings in configuration.credentials {
            do {
                let folders = handedOver + ["/etc/tokenkeeperd/apns/"]
                credentials.append(try LoadedCredential(settings, folders: folders, &tokens))
            } catch {
                problems += error.problems
            }
        }
        warnOfReadableSecrets(credentials.flatMap(\.secretFiles))
        if problems.isEmpty { return credentials }
        for problem in problems { Self.complain(problem) }
        throw ExitCode(ExitStatus.configuration.rawValue)
    }

    private var namedFile: String? { config ?? ProcessInfo.processInfo.environment["TOKENKEEPER_CONFIG"] }

    private func warnOfReadablePassword(in configuration: Configuration) {
        let path = namedFile ?? Self.usualFile
        var about = stat()
        guard configuration.address.password != nil, configuration.values["database_url"]?.rank == .file,
            unsafe stat(path, &about) == 0, about.st_mode & S_IROTH != 0
        else { return }
        Self.complain(
            "warning: \(path) contains a password, and everybody on this machine can read it: put the password into a file of its own, or run `chmod 600 \(ShellWord.quoted(path))`"
        )
    }

    /// Files that systemd passes are not checked: no other user can read them.
    private func warnOfReadableSecrets(_ paths: [String]) {
        let handedOver = ProcessInfo.processInfo.environment["CREDENTIALS_DIRECTORY"].map { $0 + "/" }
        for path in paths where !(handedOver.map(path.hasPrefix) ?? false) {
            if let warning = SecretFile(path)?.warning() { Self.complain("warning: \(warning)") }
        }
    }

    /// Removes a password from the process list, where everybody on the machine can read it. It was visible for a moment, so a
    /// warning says to keep it in a file.
    private func wipePassword() {
        for argument in CommandLine.arguments.dropFirst() {
            let text = argument.split(separator: "=", maxSplits: 1).last.map(String.init) ?? ""
            guard [argument, text].contains(where: { (try? DatabaseAddress($0))?.password != nil }) else { continue }
            Self.complain(
                "a password on the command line can be read by everybody on this machine: use database_password_file or ~/.pgpass"
            )
            for index in 0..<Int(CommandLine.argc) {
                guard let memory = unsafe CommandLine.unsafeArgv[index], unsafe String(cString: memory) == argument
                else { continue }
                unsafe memset(memory, Int32(UInt8(ascii: "x")), strlen(memory))
            }
        }
    }

    static func complain(_ problem: String) {
        let priority = Journal.isListening ? problem.hasPrefix("warning: ") ? "<4>" : "<3>" : ""
        let bytes = Array("\(priority)tokenkeeperd: \(problem)\n".utf8)
        _ = unsafe write(STDERR_FILENO, bytes, bytes.count)
    }
}

extension Configuration {
    func logger() -> Logger {
        Logger(label: "tokenkeeperd") { _ in LogfmtHandler(threshold: LogThreshold(logLevel)) }
    }

    /// For a command that changes the schema: the database must be named, and is not libpq's default.
    func withNamedDatabase(_ work: (inout Connection) throws -> Void) throws {
        guard address.namesDatabase else {
            ConfigurationOptions.complain("no database is named: use --database-url postgresql:///NAME")
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        try withConnection(work)
    }

    /// For a command that needs a schema that fits this daemon.
    ///
    /// - Parameters:
    ///   - writes: Whether the primary is needed.
    ///   - role: The group role whose rights the command needs.
    func withLedger(writes: Bool = true, as role: String, _ work: (inout Connection) throws -> Void) throws {
        try withConnection(writes: writes, as: role) { connection in
            try Migrator(daemon: Daemon.version).check(&connection)
            try work(&connection)
        }
    }

    /// For a command that needs the database once: prints an error and exits.
    ///
    /// - Parameters:
    ///   - writes: Whether the primary is needed.
    ///   - role: The group role whose rights the command needs.
    private func withConnection(writes: Bool = true, as role: String? = nil, _ work: (inout Connection) throws -> Void)
        throws
    {
        do {
            var connection = try Connection(to: address, writes: writes)
            try work(&connection)
        } catch let error as DatabaseError {
            ConfigurationOptions.complain(error.description)
            if error.sqlState == "42501" {
                ConfigurationOptions.complain(
                    role.map { "this role lacks rights: the command needs the rights of \($0)" }
                        ?? "this role lacks rights: see `tokenkeeperd migrate --help` and `tokenkeeperd grants --help`")
            }
            throw ExitCode(ExitStatus.unavailable.rawValue)
        } catch let error as SchemaError {
            ConfigurationOptions.complain(error.description)
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
    }
}
