/// One row of the configuration table: everything that can be set, and the only place where it is declared.
struct Setting: Sendable {
    enum Kind: Sendable {
        case text
        /// A duration such as `"90d"`; with `off` also the word "off".
        case duration(ClosedRange<Duration>, off: Bool)
        case integer(ClosedRange<Int>)
        /// A share such as `"0.5%"`.
        case share
        case choice([String])
        /// On or off; the file may have a boolean instead.
        case toggle
        /// Words with blanks between them; the file may have an array of texts instead.
        case words
        /// A host and a port, such as `api.push.apple.com:443`.
        case server
    }

    /// As in the file, with its section: `sweep.interval`.
    private(set) var key: String
    let kind: Kind
    /// As it would stand in the file without quotes; nil where unset is meant.
    let defaultValue: String?
    let secret: Bool
    /// Whether a reload takes it up; else a restart does.
    let reloadable: Bool
    let meaning: String
    /// What to show in the default file where there is no default.
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

    /// `TOKENKEEPER_SWEEP_INTERVAL` for `sweep.interval`.
    var variable: String {
        "TOKENKEEPER_" + key.uppercased().map { $0 == "." ? "_" : String($0) }.joined()
    }

    static let table: [Setting] = [
        Setting(
            "database_url", .text, nil, secret: true, reloadable: false,
            example: "postgresql:///push?host=/run/postgresql",
            "The database, as libpq takes it: postgresql://... or host=... dbname=... . Unset: libpq's own variables and files."
        ),
        Setting(
            "database_password_file", .text, nil, reloadable: false, example: "/etc/tokenkeeperd/password",
            "A file that holds the database password and nothing else. Read anew for each connection."),
        Setting(
            "drain.poll_busy", .duration(.milliseconds(1)...(.seconds(1)), off: false), "20ms",
            "The pause between two looks at the queue while there is work."),
        Setting(
            "drain.poll_idle", .duration(.milliseconds(50)...(.seconds(60)), off: false), "1s",
            "The longest pause between two looks when the queue stays empty."),
        Setting(
            "drain.lock_timeout", .duration(.milliseconds(10)...(.milliseconds(900)), off: false), "100ms",
            "How long the daemon waits for a lock before it yields. Below the server's deadlock_timeout."),
        Setting(
            "drain.queue_truncate", .toggle, "on",
            "Whether sealed partitions of the queue are read whole and truncated; \"off\" where standbys are read from: a TRUNCATE is replayed there with its lock."
        ),
        Setting(
            "drain.second_connection", .toggle, "on",
            "Whether a backlog is drained by two connections at once; the second one is made for it, and closed afterwards."
        ),
        Setting(
            "drain.rejected_per_hour", .integer(1...1_000_000), "10000",
            "The most results that could not be understood that are kept within an hour, 8 KiB of text each; the rest is counted only."
        ),
        Setting(
            "guard.allowance", .integer(0...1_000_000_000), "50",
            "So many tokens of a topic may be suppressed by suspects (BadDeviceToken, and 410s that are not from APNs) within a day, whatever their share."
        ),
        Setting(
            "guard.max_share", .share, "0.5%",
            "Beyond this share of a topic's active tokens, suppressed within a day, suspects are held; \"100%\" turns that off."
        ),
        Setting(
            "sweep.interval", .duration(.seconds(60)...days(30), off: true), "1h",
            "The time from one sweep to the next, across restarts and daemons; or \"off\"."),
        Setting(
            "sweep.suppressed_retention", .duration(.seconds(3600)...days(3650), off: false), "90d",
            "How long a suppressed token is kept, from when the ledger learned of it."),
        Setting(
            "sweep.dormant_after", .duration(days(1)...days(3650), off: true), "off",
            "Prune tokens that were not registered again for this long; or \"off\"."),
        Setting(
            "sweep.max_prune_share", .share, "10%",
            "A sweep refuses to prune more than this share of a topic's tokens within a day, unless forced; \"100%\" is no limit."
        ),
        Setting(
            "sweep.prune_allowance", .integer(0...1_000_000_000), "1000",
            "So many tokens of a topic may be pruned within a day, whatever their share."),
        Setting(
            "sweep.event_retention", .duration(days(31)...days(3650), off: false), "395d",
            "How long the history, the counts of results and the logs of sweeps and operations are kept. History goes by whole months."
        ),
        Setting(
            "sweep.rejected_retention", .duration(days(1)...days(3650), off: false), "90d",
            "How long results that could not be understood are kept."),
        Setting(
            "sweep.held_retention", .duration(days(1)...days(3650), off: false), "30d",
            "How long results held by the mass-failure guard are kept; then they are deleted, unrecorded."),
        Setting(
            "sweep.batch", .integer(1...10_000), "4000",
            "The most tokens, rejected or held results, or sweep runs that one transaction of a sweep deletes."),
        Setting(
            "sweep.send_retention", .duration(days(1)...days(3650), off: false), "30d",
            "How long requests are kept that the gate suppressed or that were failed."),
        Setting(
            "send.max_in_flight", .integer(1...1000), "500", reloadable: false,
            "The most requests that a credential has under way to a server."),
        Setting(
            "send.max_connections", .integer(1...100), "2", reloadable: false,
            "The most connections of a credential to one of Apple's servers."),
        Setting(
            "send.retry_for", .duration(.seconds(60)...days(30), off: false), "1d",
            "How long a request is tried again after it was first sent, if APNs asks for that or does not answer."),
        Setting(
            "send.background_per_hour", .integer(0...1000), "3",
            "So many background pushes a device may have within an hour; the newest of those beyond waits; 0 is no limit."
        ),
        Setting(
            "send.production_server", .server, "api.push.apple.com:443", reloadable: false,
            "Where production requests go: Apple's, on port 443 or 2197, or one for tests."),
        Setting(
            "send.sandbox_server", .server, "api.sandbox.push.apple.com:443", reloadable: false,
            "Where sandbox requests go."),
        Setting(
            "send.ca_file", .text, nil, reloadable: false, example: "/etc/tokenkeeperd/ca.pem",
            "The certificates, in PEM, that a server's is checked against, for tests. Unset: those that the system trusts."
        ),
        Setting(
            "log.level", .choice(["trace", "debug", "info", "notice", "warning", "error", "critical"]), "info",
            "The least severity that is logged."),
    ]

    /// What a credential of APNs consists of: `credential.NAME.key_file` and so on, for any name.
    static let ofCredentials: [Setting] = [
        Setting(
            "key_file", .text, nil, reloadable: false, example: "AuthKey_ABC1234567.p8",
            "The signing key for provider tokens, as Apple gives it (.p8). A name without a folder is looked for where the service keeps its keys."
        ),
        Setting(
            "key_id", .text, nil, reloadable: false, example: "ABC1234567", "The identifier of that key: 10 characters."
        ),
        Setting(
            "team_id", .text, nil, reloadable: false, example: "TEAM123456",
            "The team that it belongs to: 10 characters."),
        Setting(
            "certificate_file", .text, nil, reloadable: false, example: "push.p12",
            "Instead of a key, a client certificate: PEM, its key in it or in certificate_key_file; or PKCS#12 (.p12)."),
        Setting(
            "certificate_key_file", .text, nil, reloadable: false, example: "push.key",
            "The certificate's key in PEM, where it has a file of its own."),
        Setting(
            "certificate_password_file", .text, nil, reloadable: false, example: "push.password",
            "A file that holds the password of the certificate's key and nothing else."),
        Setting(
            "topics", .words, nil, reloadable: false, example: "com.example.app com.example.app.voip",
            "The topics that it sends to: an array of texts, or one text with blanks between them. One may end in *, for all that begin so; of several that fit, the longest counts."
        ),
        Setting(
            "environment", .choice(["production", "sandbox", "both"]), "both", reloadable: false,
            "The environment that it is good for."),
    ]

    /// The setting of that key, in the table or of a credential.
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

    /// What the value should be, in words.
    var expected: String {
        switch kind {
        case .text: "a text"
        case .duration(let range, let off):
            "a duration such as \"90s\" or \"30d\", from \(DurationText.text(range.lowerBound)) to "
                + DurationText.text(range.upperBound) + (off ? ", or \"off\"" : "")
        case .integer(let range): "a whole number from \(range.lowerBound) to \(range.upperBound)"
        case .share: "a share such as \"0.5%\", from 0% to 100%, of at most four decimal places"
        case .choice(let words): "one of " + words.joined(separator: ", ")
        case .toggle: "\"on\" or \"off\"; in the file also true or false"
        case .words: "words with blanks between them; in the file also an array of words"
        case .server: "a host and a port, such as \"api.push.apple.com:443\""
        }
    }

    /// What a value of the file means, as text; nil where its type is not the setting's.
    func text(of value: TOMLDocument.Value) -> String? {
        switch (kind, value) {
        case (.integer, .integer(let number)): String(number)
        case (.integer, _): nil
        case (.toggle, .boolean(let isOn)): isOn ? "on" : "off"
        case (.words, .texts(let words)):
            words.contains { $0.isEmpty || $0.contains(" ") } ? nil : words.joined(separator: " ")
        case (_, .text(let text)): text
        default: nil
        }
    }

    /// Whether a value, as text, is one of those expected.
    func accepts(_ text: String) -> Bool {
        switch kind {
        case .text: !text.isEmpty
        case .duration(let range, let off):
            (off && text == "off") || DurationText.duration(text).map(range.contains) ?? false
        case .integer(let range): Int(text).map(range.contains) ?? false
        case .share: ShareText.share(text) != nil
        case .choice(let words): words.contains(text)
        case .toggle: text == "on" || text == "off"
        case .words: text.contains { $0 != " " }
        case .server: ServerText.server(text) != nil
        }
    }
}
