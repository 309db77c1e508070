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
    }

    /// As in the file, with its section: `sweep.interval`.
    let key: String
    let kind: Kind
    /// As it would stand in the file without quotes; nil where unset is meant.
    let standard: String?
    let secret: Bool
    /// Whether a reload takes it up; else a restart does.
    let reloadable: Bool
    let meaning: String
    /// What to show in the default file where there is no default.
    let example: String?

    init(
        _ key: String, _ kind: Kind, _ standard: String?, secret: Bool = false, reloadable: Bool = true,
        example: String? = nil, _ meaning: String
    ) {
        self.key = key
        self.kind = kind
        self.standard = standard
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
            "drain.queue_truncate", .choice(["on", "off"]), "on",
            "Whether past leaves of the queue are read whole and truncated; \"off\" where standbys are read from: a TRUNCATE is replayed there with its lock."
        ),
        Setting(
            "drain.second_connection", .choice(["on", "off"]), "on",
            "Whether a backlog is drained by two connections at once; the second one is made for it, and closed afterwards."
        ),
        Setting(
            "guard.min_tokens", .integer(0...1_000_000_000), "50",
            "So many tokens of a topic may be silenced by suspects (BadDeviceToken) within a day, whatever their share."
        ),
        Setting(
            "guard.max_share", .share, "0.5%",
            "Beyond this share of a topic's active tokens, silenced within a day, suspects are held; \"100%\" turns that off."
        ),
        Setting(
            "sweep.interval", .duration(.seconds(60)...days(30), off: true), "1h",
            "The time from one sweep to the next, across restarts and daemons; or \"off\"."),
        Setting(
            "sweep.stale_retention", .duration(.seconds(3600)...days(3650), off: false), "90d",
            "How long a suppressed token is kept, from when the ledger learned of it."),
        Setting(
            "sweep.dormant_after", .duration(days(1)...days(3650), off: true), "off",
            "Prune tokens that were not registered again for this long; or \"off\"."),
        Setting(
            "sweep.max_prune_share", .share, "10%",
            "A sweep refuses to prune more than this share of a topic's tokens within a day, unless forced; \"100%\" is no limit."
        ),
        Setting(
            "sweep.min_prune_tokens", .integer(0...1_000_000_000), "1000",
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
            "log.level", .choice(["trace", "debug", "info", "notice", "warning", "error", "critical"]), "info",
            "The least severity that is logged."),
    ]

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
        }
    }
}
