internal import APNsFeedback
internal import ArgumentParser
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// The options that every command has.
struct ConfigurationOptions: ParsableArguments {
    @Option(
        help: ArgumentHelp(
            "The configuration: a file or a folder. [default: \(ConfigurationPlace.usual)]",
            valueName: "path"))
    var config: String?

    @Option(help: "The database: a libpq connection string without a password.")
    var databaseURL: String?

    @Option(name: .customLong("set"), help: "A setting, as key=value. May be repeated.")
    var settings: [String] = []

    init() {}

    /// Those among the arguments of any command.
    init(of command: [String]) throws(ConfigurationError) {
        var own: [String] = []
        for (place, argument) in command.enumerated() where ["--config", "--set"].contains(Self.name(of: argument)) {
            own.append(argument)
            if !argument.contains("="), place + 1 < command.count { own.append(command[place + 1]) }
        }
        do { self = try Self.parse(own) } catch { throw ConfigurationError([Self.message(for: error)]) }
    }

    private static func name(of argument: String) -> String { String(argument.prefix { $0 != "=" }) }

    /// Whether `complain` writes JSON. It does in a daemon that logs JSON, once the configuration has been read.
    private static let complainsInJSON = Atomic(false)

    /// Reads and checks everything. Prints all problems, if there are any, and exits.
    ///
    /// - Parameter toLog: Whether what is printed from then on is a part of the log, and has its format.
    func load(toLog: Bool = false) throws -> Configuration {
        do {
            let configuration = try read()
            if toLog { Self.complainsInJSON.store(configuration.logFormat == .json, ordering: .relaxed) }
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
        if let namedPath, StrayAddress.isLikely(namedPath) {
            throw ConfigurationError(["--config: expected a file or a folder; \(StrayAddress.advice)"])
        }
        let place = self.place
        let files = try place.files()
        let flags = settings + (databaseURL.map { ["database_url=\($0)"] } ?? [])
        let credentials =
            if let folder = environment["CREDENTIALS_DIRECTORY"] {
                try DatabaseCredentials(handedOverIn: folder)
            } else if let folder = place.credentialsFolder {
                try DatabaseCredentials(ofServiceIn: folder)
            } else {
                DatabaseCredentials()
            }
        return try Configuration(files: files, credentials: credentials, environment: environment, flags: flags)
    }

    /// Reads the files of the credentials for APNs. Prints all problems, if there are any, and exits.
    ///
    /// - Parameter tokens: Those to which the credentials add.
    func loadCredentials(
        of configuration: Configuration, _ tokens: ProviderTokens = ProviderTokens()
    ) throws -> [LoadedCredential] {
        do {
            let credentials = try readCredentials(of: configuration, tokens)
            warn(of: credentials, configuration)
            return credentials
        } catch {
            for problem in error.problems { Self.complain(problem) }
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
    }

    /// The credentials for APNs, as the daemon uses them. Says which cannot be used: their topics wait, and everything else works.
    func credentialSources(of configuration: Configuration, _ tokens: ProviderTokens) -> [CredentialSource] {
        let shared = SharedProviderTokens(tokens)
        let sources = configuration.credentials.map { CredentialSource($0, folders: credentialFolders, shared) }
        warn(of: sources.compactMap(\.loaded), configuration)
        for fault in sources.compactMap(\.fault) { Self.complain("warning: \(fault); its topics wait") }
        return sources
    }

    /// Prints what is likely to be wrong with files that can be used.
    private func warn(of credentials: [LoadedCredential], _ configuration: Configuration) {
        let proxyPassword = configuration.values["send.proxy_password_file"]?.value
        warnOfReadableSecrets(credentials.flatMap(\.secretFiles) + [proxyPassword].compactMap(\.self))
        for doubt in credentials.compactMap(\.doubt) { Self.complain("warning: \(doubt)") }
    }

    /// The folders in which the files of credentials are looked for.
    var credentialFolders: [String] {
        (ProcessInfo.processInfo.environment["CREDENTIALS_DIRECTORY"].map { [$0 + "/apns_"] } ?? []) + [place.keyFolder]
    }

    /// Reads the files of the credentials for APNs.
    ///
    /// - Throws: All problems.
    func readCredentials(
        of configuration: Configuration, _ tokens: ProviderTokens = ProviderTokens()
    ) throws(ConfigurationError) -> [LoadedCredential] {
        var credentials: [LoadedCredential] = []
        var tokens = tokens
        var problems: [String] = []
        for settings in configuration.credentials {
            do {
                credentials.append(try LoadedCredential(settings, folders: credentialFolders, &tokens))
            } catch {
                problems += error.problems
            }
        }
        if let file = configuration.values["send.proxy_password_file"]?.value {
            do {
                _ = try SecretBytes(contentsOf: file)
            } catch {
                problems.append("send.proxy_password_file: \(file) cannot be read: \(error)")
            }
        }
        if !problems.isEmpty { throw ConfigurationError(problems) }
        return credentials
    }

    /// Prints why the daemon could not use its directories. Exits if an operator chose one of these.
    func checkRuntimeDirectories(of configuration: Configuration) throws {
        var isRefused = false
        for directory in configuration.runtimeDirectories {
            guard let fault = directory.fault(rootChecks: true) else { continue }
            Self.complain(directory.isExplicit ? fault : "warning: \(fault)")
            isRefused = isRefused || directory.isExplicit
        }
        if isRefused { throw ExitCode(ExitStatus.configuration.rawValue) }
    }

    /// The daemon works without the directories: a fault of one is no reason to stop sending.
    func warnOfRuntimeDirectories(of configuration: Configuration) {
        if configuration.credentials.isEmpty { return }
        for directory in configuration.runtimeDirectories {
            guard let fault = directory.fault() else { continue }
            let effect =
                switch directory.purpose {
                case .runtime: "after a restart, APNs may refuse a new provider token"
                case .providerTokens: "APNs may refuse provider tokens if other daemons make some with the same key"
                }
            Self.complain("warning: \(fault). The daemon works without it: \(effect)")
        }
    }

    private var namedPath: String? { config ?? ProcessInfo.processInfo.environment["TOKENKEEPER_CONFIG"] }

    private var place: ConfigurationPlace { ConfigurationPlace(namedPath) }

    private func warnOfReadablePassword(in configuration: Configuration) {
        let inURL = configuration.address.password != nil ? configuration.values["database_url"]?.file : nil
        let inProxy = ProxySettings(in: configuration.values).fileWithPassword
        for path in Set([inURL, inProxy].compactMap(\.self)).sorted() {
            var about = stat()
            guard unsafe stat(path, &about) == 0, about.st_mode & S_IROTH != 0 else { continue }
            let word = ShellWord.quoted(path)
            Self.complain(
                "warning: \(path) contains a password, and everybody on this machine can read it: put the password into a file of its own, or let only root and the daemon's group read it: `chgrp tokenkeeperd \(word); chmod 640 \(word)`"
            )
        }
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
    func wipePassword() {
        for argument in CommandLine.arguments.dropFirst() {
            let text = argument.split(separator: "=", maxSplits: 1).last.map(String.init) ?? ""
            let isDatabases = [argument, text].contains { (try? DatabaseAddress($0))?.password != nil }
            let proxy = argument.firstRange(of: "http").flatMap { PushProxy(String(argument[$0.lowerBound...])) }
            guard isDatabases || proxy?.hasPassword == true else { continue }
            Self.complain(
                "a password on the command line can be read by everybody on this machine: use "
                    + (isDatabases ? "database_password_file or ~/.pgpass" : "send.proxy_password_file"))
            for index in 0..<Int(CommandLine.argc) {
                guard let memory = unsafe CommandLine.unsafeArgv[index], unsafe String(cString: memory) == argument
                else { continue }
                unsafe memset(memory, Int32(UInt8(ascii: "x")), strlen(memory))
            }
        }
    }

    static func complain(_ problem: String) {
        let isWarning = problem.hasPrefix("warning: ")
        let line =
            if complainsInJSON.load(ordering: .relaxed) {
                LogFormat.json.line(
                    at: .now, isWarning ? .warning : .error,
                    isWarning ? String(problem.dropFirst("warning: ".count)) : problem, [:],
                    toJournal: Journal.isListening)
            } else {
                (Journal.isListening ? isWarning ? "<4>" : "<3>" : "") + "tokenkeeperd: \(problem)"
            }
        let bytes = Array("\(line)\n".utf8)
        _ = unsafe write(STDERR_FILENO, bytes, bytes.count)
    }
}

extension Configuration {
    func logger() -> Logger {
        Logger(label: "tokenkeeperd") { _ in StandardErrorLog(threshold: LogThreshold(logLevel), format: logFormat) }
    }

    /// For a command that changes the schema: the database must be named, and is not libpq's default.
    func withNamedDatabase(writes: Bool = true, as role: String? = nil, _ work: (inout Connection) throws -> Void)
        throws
    {
        guard address.namesDatabase else {
            ConfigurationOptions.complain(Self.noDatabase)
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        try withConnection(writes: writes, as: role, likeService: false, work)
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
    ///   - likeService: Whether root connects as the service's user: not for what only an owner may do, who is never the service.
    func withConnection(
        writes: Bool = true, as role: String? = nil, likeService: Bool = true, _ work: (inout Connection) throws -> Void
    ) throws {
        do {
            var connection =
                likeService ? try connectLikeService(writes: writes) : try Connection(to: address, writes: writes)
            try work(&connection)
        } catch let error as DatabaseError {
            let status = ExitStatus(error)
            // What the caller has written wrongly is said without the SQLSTATE.
            ConfigurationOptions.complain(status == .usage ? error.message : error.description)
            if let hint = error.hint {
                ConfigurationOptions.complain(hint)
            } else if error.sqlState == "42501" {
                ConfigurationOptions.complain(
                    role.map { "this role lacks rights: the command needs the rights of \($0)" }
                        ?? "this role lacks rights: see `tokenkeeperd migrate --help` and `tokenkeeperd grants --help`")
            }
            throw ExitCode(status.rawValue)
        } catch let error as SchemaError {
            ConfigurationOptions.complain(error.description)
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
    }
}
