/// One row of the configuration table, which is the only place where settings are declared.
struct Setting: Sendable {
    enum Kind: Sendable {
        case text
        /// A duration such as `"90d"`; also the word "off" if `off` is true.
        case duration(ClosedRange<Duration>, off: Bool)
        case integer(ClosedRange<Int>)
        /// A share such as `"0.5%"`.
        case share
        case choice([String])
        /// A boolean in the file; "on" or "off" in a variable or a flag.
        case toggle
        /// An array of strings in the file; separated by blanks in a variable or a flag.
        case words
        /// Names of hosts, written as `words` are.
        case hosts
        /// A host and a port, such as `api.push.apple.com:443`.
        case server
        /// A proxy such as `http://proxy.example:3128`, or "none".
        case proxy
        /// An address to listen on, such as `127.0.0.1:9188`.
        case listen
    }

    /// As in the file, with its section: `sweep.interval`.
    private(set) var key: String
    let kind: Kind
    /// As in the file, without quotes; nil if the setting is unset by default.
    let defaultValue: String?
    let secret: Bool
    /// Whether a reload applies it. Otherwise it needs a restart.
    let reloadable: Bool
    let meaning: String
    /// What the default file shows if there is no default.
    let example: String?

    init(
        _ key: String, _ kind: Kind, _ defaultValue: String?, secret: Bool = false, reloadable: Bool = true,
        example: String? = nil, _ meaning: String
    ) {
        self.key = key
        self.kind = kind
        self.defaultValue = defaultValue
        self.secret = secret
        self.reloadable = reloadable
        self.meaning = meaning
        self.example = example
    }

    var variable: String { Self.variable(of: key) }

    static let table: [Setting] = [
        Setting(
            "database_url", .text, nil, secret: true, reloadable: false,
            example: "postgresql:///push?host=/run/postgresql",
            "The database: a libpq connection string. Unset: libpq's own variables and files."
        ),
        Setting(
            "database_password_file", .text, nil, reloadable: false, example: "/etc/tokenkeeperd/password",
            "A file with only the database password. Read for each connection."),
        Setting(
            "runtime_directory", .text, nil, reloadable: false, example: "/run/tokenkeeperd",
            "A directory with mode 0700 for what the next start of a sending daemon needs, such as the provider token. Unset: the one that systemd makes ($RUNTIME_DIRECTORY), or none."
        ),
        Setting(
            "map.file", .text, nil, example: "/etc/tokenkeeperd/map.json",
            "The map of several databases. Unset: there is one database."),
        Setting(
            "map.database", .text, nil, example: "east",
            "The name of this database in the map. Then status and doctor name topics here that belong to another database."
        ),
        Setting(
            "drain.poll_busy", .duration(.milliseconds(1)...(.seconds(1)), off: false), "20ms",
            "The pause between two polls of the queues while there is work."),
        Setting(
            "drain.poll_idle", .duration(.milliseconds(50)...(.seconds(60)), off: false), "1s",
            "The longest pause between two polls while the queues are empty."),
        Setting(
            "drain.lock_timeout", .duration(.milliseconds(10)...(.milliseconds(900)), off: false), "100ms",
            "How long the daemon waits for a lock before it yields. Keep it below the server's deadlock_timeout."),
        Setting(
            "drain.queue_truncate", .toggle, "on",
            "Whether sealed partitions of the queues are truncated, and results read in bulk. Turn it off where standbys serve reads: they replay the TRUNCATE with its lock."
        ),
        Setting(
            "drain.second_connection", .toggle, "on",
            "Whether the daemon opens a second connection while it drains a backlog."
        ),
        Setting(
            "drain.rejected_per_hour", .integer(1...1_000_000), "10000",
            "How many rejected results, and how many rejected registrations, are kept per hour, counting each started 8 KiB of text. The rest are only counted."
        ),
        Setting(
            "guard.allowance", .integer(0...1_000_000_000), "5",
            "Suspects (BadDeviceToken, and 410s that APNs did not send) may suppress this many tokens of a topic per day, whatever their share. So may logouts from attached tables and files."
        ),
        Setting(
            "guard.max_share", .share, "0.5%",
            "When suspects would suppress more than this share of a topic's active tokens within a day, they are held. So are logouts from attached tables and files. \"100%\" turns the guard off."
        ),
        Setting(
            "guard.hold_stale_share", .share, "100%",
            "When more than this share of a topic's active tokens, and more than guard.allowance, would newly turn stale (a 410) within a day, further 410s are held. \"100%\" holds none."
        ),
        Setting(
            "sweep.interval", .duration(.seconds(60)...days(30), off: true), "1h",
            "The time between two sweeps, across restarts and daemons. \"off\" turns the timer off."),
        Setting(
            "sweep.suppressed_retention", .duration(.seconds(3600)...days(3650), off: false), "90d",
            "How long a suppressed token is kept after its suppression was recorded."
        ),
        Setting(
            "sweep.dormant_after", .duration(days(1)...days(3650), off: true), "off",
            "Prune tokens that have not been registered for this long. \"off\" never prunes them."),
        Setting(
            "sweep.max_prune_share", .share, "10%",
            "A sweep refuses to prune more than this share of a topic's tokens within a day, unless forced. \"100%\" is no limit."
        ),
        Setting(
            "sweep.prune_allowance", .integer(0...1_000_000_000), "1000",
            "A sweep may prune this many tokens of a topic per day, whatever their share."
        ),
        Setting(
            "sweep.event_retention", .duration(days(31)...days(3650), off: false), "395d",
            "How long the history, the result counts, and the logs of sweeps and operations are kept. The history is deleted by whole months."
        ),
        Setting(
            "sweep.rejected_retention", .duration(days(1)...days(3650), off: false), "90d",
            "How long rejected results and registrations are kept."),
        Setting(
            "sweep.held_retention", .duration(days(1)...days(3650), off: false), "30d",
            "How long results and logouts that the guard holds are kept. Then they are deleted unrecorded."
        ),
        Setting(
            "sweep.batch", .integer(1...10_000), "4000",
            "The most rows that one transaction of a sweep deletes."),
        Setting(
            "sweep.send_retention", .duration(days(1)...days(3650), off: false), "30d",
            "How long suppressed and failed requests, and campaigns that have ended, are kept."),
        Setting(
            "send.max_in_flight", .integer(1...1000), "500", reloadable: false,
            "The most requests that a credential has in flight to a server."),
        Setting(
            "send.max_connections", .integer(1...100), "2", reloadable: false,
            "The most connections of a credential to a server."),
        Setting(
            "send.retry_for", .duration(.seconds(60)...days(30), off: false), "1d",
            "How long a request is retried after it was first sent, when APNs asks for a retry or does not respond."),
        Setting(
            "send.background_per_hour", .integer(0...1000), "3",
            "How many background pushes a device gets per hour. Beyond that, only the newest is kept, and it is delayed. 0 is no limit."
        ),
        Setting(
            "send.production_server", .server, "api.push.apple.com:443", reloadable: false,
            "The server for production requests: Apple's, on port 443 or 2197, or a test server."),
        Setting(
            "send.sandbox_server", .server, "api.sandbox.push.apple.com:443", reloadable: false,
            "The server for sandbox requests."),
        Setting(
            "send.ca_file", .text, nil, reloadable: false, example: "/etc/tokenkeeperd/ca.pem",
            "A PEM file of the certificate authorities to trust, for tests. Unset: the system's."
        ),
        Setting(
            "send.proxy", .proxy, nil, secret: true, reloadable: false, example: "http://user@proxy.example:3128",
            "The HTTP proxy to APNs: http://host:port or https://host:port, with user:password@ before the host if it asks for them. \"none\" is no proxy. Unset: https_proxy and no_proxy in the environment."
        ),
        Setting(
            "send.proxy_password_file", .text, nil, reloadable: false, example: "/etc/tokenkeeperd/proxy-password",
            "A file with only the password for send.proxy. Read for each connection."),
        Setting(
            "send.provider_token_directory", .text, nil, reloadable: false,
            example: "/run/tokenkeeperd.provider-tokens",
            "A directory with mode 0700 for provider tokens that the daemons of several databases on one machine share, one per key. Unset: runtime_directory."
        ),
        Setting(
            "metrics.listen", .listen, nil, reloadable: false, example: "127.0.0.1:9188",
            "Where the daemon serves /metrics for Prometheus, /live, /ready and the status page, to everybody who can connect. Unset: nowhere."
        ),
        Setting(
            "metrics.hosts", .hosts, nil, reloadable: false, example: "tokenkeeperd.example.com",
            "Names that a Host header may have, in addition to IP addresses, names without a dot and this machine's own name."
        ),
        Setting(
            "metrics.page", .choice(PageAccess.allCases.map(\.rawValue)), PageAccess.loopback.rawValue,
            reloadable: false,
            "Who may see the status page and look up tokens there: nobody (off), clients on this machine (loopback) or everybody (network)."
        ),
        Setting(
            "log.level", .choice(["trace", "debug", "info", "notice", "warning", "error", "critical"]), "info",
            "The lowest severity that is logged."),
        Setting(
            "log.format", .choice(LogFormat.allCases.map(\.rawValue)), "logfmt", reloadable: false,
            "A line of the log: words and name=value, or one JSON object."),
    ]

    /// The settings of a credential for APNs: `credential.NAME.key_file` and so on, for any name.
    static let ofCredentials: [Setting] = [
        Setting(
            "key_file", .text, nil, reloadable: false, example: "AuthKey_ABC1234567.p8",
            "The signing key, as downloaded from Apple (.p8)."
        ),
        Setting(
            "key_id", .text, nil, reloadable: false, example: "ABC1234567", "The key's identifier: 10 characters."
        ),
        Setting(
            "team_id", .text, nil, reloadable: false, example: "TEAM123456",
            "The identifier of the key's team: 10 characters."),
        Setting(
            "certificate_file", .text, nil, reloadable: false, example: "push.p12",
            "A client certificate instead of a key: PKCS#12 (.p12), or PEM with its key in the same file or in certificate_key_file."
        ),
        Setting(
            "certificate_key_file", .text, nil, reloadable: false, example: "push.key",
            "The certificate's private key in PEM, if it has its own file."),
        Setting(
            "certificate_password_file", .text, nil, reloadable: false, example: "push.password",
            "A file with only the password of the private key."),
        Setting(
            "topics", .words, nil, reloadable: false, example: "com.example.app com.example.app.voip",
            "The topics to send to. A topic may end in * for every topic with that beginning. Of several matches, the longest wins."
        ),
        Setting(
            "environment", .choice(["production", "sandbox", "both"]), "both", reloadable: false,
            "The environment that the credential is valid for."),
    ]

    /// The variable of a key: `TOKENKEEPER_SWEEP_INTERVAL` for `sweep.interval`.
    static func variable(of key: String) -> String {
        "TOKENKEEPER_" + key.uppercased().map { $0 == "." ? "_" : String($0) }.joined()
    }

    /// The setting with this key, from the table or of a credential.
    static func named(_ key: String) -> Setting? {
        if let setting = table.first(where: { $0.key == key }) { return setting }
        let parts = key.split(separator: ".", omittingEmptySubsequences: false)
        guard parts.count == 3, parts[0] == "credential", isCredentialName(parts[1]),
            var setting = ofCredentials.first(where: { $0.key == parts[2] })
        else { return nil }
        setting.key = key
        return setting
    }

    private static func isCredentialName(_ name: Substring) -> Bool {
        !name.isEmpty && name.utf8.count <= 40
            && name.allSatisfy { $0.isASCII && ($0.isLetter || $0.isNumber || $0 == "_" || $0 == "-") }
    }

    static func days(_ count: Int) -> Duration { .seconds(86_400 * count) }
}
