internal import APNsFeedback
internal import Logging
internal import TokenLedger
internal import TokenModel

/// The settings in force, checked. In order of precedence: flags, the environment, systemd's credentials, the files, the
/// defaults.
struct Configuration: Sendable {
    /// A setting's value, and where it came from.
    struct Resolved: Equatable, Sendable {
        var value: String?
        var rank = Rank.defaultValue
        /// The file and line, or the rank, in words.
        var origin: String
        /// The configuration file that it came from; nil if from elsewhere.
        var file: String?
    }

    /// The source of a value; a later one overrides the earlier ones.
    enum Rank: Int, Sendable, Comparable {
        case defaultValue, file, credential, environment, flag

        static func < (left: Rank, right: Rank) -> Bool { left.rawValue < right.rawValue }
    }

    let values: [String: Resolved]
    let address: DatabaseAddress

    /// Variables that begin like a setting's but are not settings: our own `TOKENKEEPER_CONFIG`, and the ones that Kubernetes and
    /// Docker set for a service named tokenkeeper.
    private static func isNoSetting(_ variable: String) -> Bool {
        variable == "TOKENKEEPER_CONFIG" || variable.hasPrefix("TOKENKEEPER_PORT")
            || variable.hasPrefix("TOKENKEEPER_SERVICE_")
    }

    /// The characters of keys. An error does not repeat a key with any other character: it may be a connection string with a
    /// password.
    private static let keyCharacters = Set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.".utf8)

    /// - Parameters:
    ///   - files: The configuration files. A later one overrides the earlier ones, key by key.
    ///   - credentials: The database's URL and the path of its password file, as passed by systemd.
    ///   - environment: All variables of the process.
    ///   - flags: `key=value` as given with `--set`, and the other flags in the same form.
    /// - Throws: All problems, not only the first; problems beyond 20 are only counted.
    init(
        files: [ConfigurationText], credentials: DatabaseCredentials = DatabaseCredentials(),
        environment: [String: String],
        flags: [String]
    ) throws(ConfigurationError) {
        var values: [String: Resolved] = [:]
        var problems = ConfigurationProblems()
        for setting in Setting.table { values[setting.key] = Resolved(value: setting.defaultValue, origin: "default") }

        func set(
            _ key: String, _ value: TOMLDocument.Value?, from rank: Rank, place: String, file: String? = nil
        ) {
            guard let setting = Setting.named(key) else {
                guard key.utf8.allSatisfy({ Self.keyCharacters.contains($0) }) else {
                    let expected =
                        rank == .file
                        ? "the key of a setting, found one with other characters" : "key=value, found no key"
                    problems.add("\(place): expected \(expected)")
                    return
                }
                let near = Setting.table.map(\.key).filter { $0.hasSuffix("." + key) || key.hasSuffix("." + $0) }.first
                problems.add(
                    "\(place): unknown setting \(ConfigurationProblems.cut(key))"
                        + (near.map { "; is \($0) meant?" } ?? ""))
                return
            }
            if !setting.secret, Self.looksLikeAddress(value) {
                problems.add(
                    "\(place): \(key) looks like a database address or another URL (not repeated here), "
                        + "expected \(setting.expected)")
                return
            }
            // Flags and variables carry only text.
            let text: String? =
                if rank != .file, case .text(let text) = value { text } else { value.flatMap { setting.text(of: $0) } }
            guard let text, setting.accepts(text) else {
                let found = setting.secret ? "not usable" : Self.inWords(value)
                problems.add("\(place): \(key) is \(found), expected \(setting.expected)")
                return
            }
            values[key] = Resolved(value: text, rank: rank, origin: file == nil ? "\(rank)" : place, file: file)
        }

        for file in files {
            do {
                for entry in try ConfigurationFile(file.contents, name: file.name).entries {
                    set(entry.key, entry.value, from: .file, place: "\(file.name):\(entry.line)", file: file.name)
                }
            } catch {
                problems.add(error)
            }
        }
        for (key, value) in [
            ("database_url", credentials.databaseURL), ("database_password_file", credentials.databasePasswordFile),
        ] {
            if let value { set(key, .text(value), from: .credential, place: "credential of \(key)") }
        }
        for (name, value) in environment.sorted(by: { $0.key < $1.key })
        where name.hasPrefix("TOKENKEEPER_") && !Self.isNoSetting(name) {
            if let setting = Setting.table.first(where: { $0.variable == name }) {
                set(setting.key, .text(value), from: .environment, place: "environment variable \(name)")
            } else {
                problems.add("environment variable \(ConfigurationProblems.cut(name)): no setting has that name")
            }
        }
        for flag in flags {
            guard let equals = flag.firstIndex(of: "=") else {
                // Not repeated: it may be a connection string with a password.
                problems.add("--set: expected key=value")
                continue
            }
            set(
                String(flag[..<equals]), .text(String(flag[flag.index(after: equals)...])), from: .flag,
                place: "command line")
        }

        if values["runtime_directory"]?.rank == .defaultValue, let path = RuntimeDirectory.first(in: environment) {
            values["runtime_directory"] = Resolved(value: path, rank: .environment, origin: RuntimeDirectory.variable)
        }
        CredentialSettings.addProblems(in: values, to: &problems)
        ProxySettings(in: values).addProblems(to: &problems)
        var address: DatabaseAddress?
        do {
            address = try Self.address(values, credentials)
        } catch {
            problems.add(error)
        }
        guard problems.isEmpty, let address else { throw ConfigurationError(problems.lines) }
        self.values = values
        self.address = address
    }

    /// Whether a value may contain a database password. Only `database_url` has such a value, so errors about other settings do
    /// not repeat it.
    private static func looksLikeAddress(_ value: TOMLDocument.Value?) -> Bool {
        switch value {
        case .text(let text): StrayAddress.isLikely(text)
        case .texts(let texts): StrayAddress.isLikely(texts.joined(separator: " "))
        case .integer, .boolean, nil: false
        }
    }

    private static func inWords(_ value: TOMLDocument.Value?) -> String {
        switch value {
        case .text(let text): ConfigurationProblems.quoted(text)
        case .integer(let number): "\(number)"
        case .boolean(let boolean): "\(boolean)"
        case .texts(let texts): ConfigurationProblems.quoted(texts)
        case nil: "a section"
        }
    }

    /// The URL with its password. A password file belongs to the URL of the same rank or a lower one. It is not used for a
    /// database that somebody names by hand, unless systemd passed the file to this process.
    private static func address(
        _ values: [String: Resolved], _ credentials: DatabaseCredentials
    ) throws(ConfigurationError) -> DatabaseAddress {
        let url = values["database_url"]
        var address: DatabaseAddress
        do {
            address = try DatabaseAddress(url?.value)
        } catch {
            throw ConfigurationError(["\(url?.origin ?? ""): database_url is \(error.message)"])
        }
        guard let url, let file = values["database_password_file"], let path = file.value else { return address }
        let isHandedOver = file.rank == .credential && credentials.areHandedOver
        let isForOther = url.rank > file.rank || (file.rank == .credential && url.value == nil)
        if isForOther && !isHandedOver { return address }
        if address.password != nil && url.rank == file.rank {
            throw ConfigurationError([
                "\(file.origin): database_password_file is set, and database_url contains a password: keep one"
            ])
        }
        if address.password == nil || url.rank < file.rank { address.passwordFile = path }
        return address
    }

    /// Takes settings that have been checked already.
    init(values: [String: Resolved], address: DatabaseAddress) {
        self.values = values
        self.address = address
    }

    /// The settings that are not the default, as `key=value`, in the order of their keys. Without secrets, and without what systemd hands over:
    /// that differs between the service and a command with the same files.
    var chosen: [String] {
        values.sorted { $0.key < $1.key }.compactMap { key, resolved in
            guard let setting = Setting.named(key), !setting.secret, resolved.rank != .credential,
                key != "runtime_directory", let value = resolved.value, value != setting.defaultValue
            else { return nil }
            return "\(key)=\(value)"
        }
    }

    private func text(_ key: String) -> String { values[key]?.value ?? "" }

    private func duration(_ key: String) -> Duration {
        guard let duration = DurationText.duration(text(key)) else {
            preconditionFailure("\(key) is not a duration: the table of settings and the configuration differ")
        }
        return duration
    }

    private func share(_ key: String) -> Share {
        guard let share = Share(text(key)) else {
            preconditionFailure("\(key) is not a share: the table of settings and the configuration differ")
        }
        return share
    }

    private func durationOrOff(_ key: String) -> Duration? { text(key) == "off" ? nil : duration(key) }

    var pollBusy: Duration { duration("drain.poll_busy") }
    var pollIdle: Duration { max(duration("drain.poll_idle"), pollBusy) }
    var queueTruncate: Bool { text("drain.queue_truncate") == "on" }
    var secondConnection: Bool { text("drain.second_connection") == "on" }
    var lockTimeout: Duration { duration("drain.lock_timeout") }
    var rejectedPerHour: Int64 { Int64(text("drain.rejected_per_hour")) ?? 10_000 }
    var guardLimits: GuardLimits {
        GuardLimits(
            allowance: Int64(text("guard.allowance")) ?? 5, maxShare: share("guard.max_share"),
            holdStaleShare: share("guard.hold_stale_share"))
    }
    /// Nil if the timer is off.
    var sweepInterval: Duration? { durationOrOff("sweep.interval") }
    /// The credentials to send with; empty if the daemon does not send.
    var credentials: [CredentialSettings] { CredentialSettings.all(in: values) }
    var clientOptions: PushClientOptions {
        var servers: [Environment: PushServer] = [:]
        for environment in Environment.allCases {
            servers[environment] = PushServer(text("send.\(environment.rawValue)_server"))
        }
        return PushClientOptions(
            servers: servers, authorityFile: values["send.ca_file"]?.value, route: ProxySettings(in: values).route,
            inFlight: Int(text("send.max_in_flight")) ?? 500, connections: Int(text("send.max_connections")) ?? 2)
    }
    var sendPolicy: RetryPolicy { RetryPolicy(retryFor: duration("send.retry_for")) }
    var backgroundPerHour: Int { Int(text("send.background_per_hour")) ?? 3 }
    /// The directory for files that the next start needs; nil if there is none, or if other users have access to it. Looks at the
    /// directory each time.
    var runtimeDirectory: String? {
        RuntimeDirectory(in: values).flatMap { $0.fault() == nil ? $0.path : nil }
    }
    /// The directory for provider tokens: that of several daemons, or else that of this daemon. Looks at the directories each time.
    var providerTokenDirectory: String? {
        let shared = RuntimeDirectory(in: values, for: .providerTokens)
        return shared.flatMap { $0.fault() == nil ? $0.path : nil } ?? runtimeDirectory
    }
    /// Those that are named.
    var runtimeDirectories: [RuntimeDirectory] {
        RuntimeDirectory.Purpose.allCases.compactMap { RuntimeDirectory(in: values, for: $0) }
    }
    /// Where to serve scrapes; nil for nowhere.
    var metricsAddress: ListenAddress? { values["metrics.listen"]?.value.flatMap(ListenAddress.init) }
    var hostNames: HostNames {
        HostNames((values["metrics.hosts"]?.value ?? "").split(separator: " ").map(String.init))
    }
    var pageAccess: PageAccess { values["metrics.page"]?.value.flatMap(PageAccess.init) ?? .off }
    var logFormat: LogFormat { LogFormat(rawValue: text("log.format")) ?? .logfmt }
    var logLevel: Logger.Level { Logger.Level(rawValue: text("log.level")) ?? .info }

    var sweepPlan: SweepPlan {
        SweepPlan(
            suppressedRetention: duration("sweep.suppressed_retention"),
            dormantAfter: durationOrOff("sweep.dormant_after"),
            eventRetention: duration("sweep.event_retention"),
            rejectedRetention: duration("sweep.rejected_retention"),
            heldRetention: duration("sweep.held_retention"), sendRetention: duration("sweep.send_retention"),
            allowance: Int64(text("sweep.prune_allowance")) ?? 1000, maxShare: share("sweep.max_prune_share"),
            batch: Int(text("sweep.batch")) ?? 4000)
    }
}
