internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// How a file is read: the options of `import`.
struct ImportOptions: ParsableArguments {
    /// What a file may be.
    enum Format: String, ExpressibleByArgument, CaseIterable {
        case csv
        case jsonl
        case appleFeedback = "apple-feedback"
        case azure
        case pnsfeedback
        case sygnal

        /// Feedback of APNs says which tokens are bad. The others say which are registered.
        var queue: ImportSource.Queue { self == .appleFeedback || self == .pnsfeedback ? .result : .registration }
        var hasColumns: Bool { self == .csv || self == .jsonl }
        var isCSV: Bool { self == .csv || self == .sygnal }
    }

    /// How tokens are written.
    enum TokenForm: String, ExpressibleByArgument, CaseIterable {
        /// Every form that `tokenkeeper.parse_token` reads.
        case hex
        /// Base64 as well.
        case base64
    }

    @Option(
        help: ArgumentHelp(
            "apple-feedback: Apple's legacy feedback service; azure: registrations of Notification Hubs; pnsfeedback: its PnsFeedback files; sygnal: Synapse's table pushers, as CSV.",
            valueName: "format"))
    var format: Format

    @Option(
        help: ArgumentHelp(
            "csv, jsonl: the column or key of token, topic, environment, registered_at, device_id, user_id, tags, unregistered, or active (the opposite; only if named). May be repeated. [default: the field's name]",
            valueName: "field=column"))
    var column: [String] = []

    @Flag(help: "csv: the file has no header; --column counts columns from 1.")
    var noHeader = false

    @Option(help: "csv, sygnal: the character between cells, or tab. [default: ,]")
    var delimiter: String?

    @Option(help: "csv, jsonl, sygnal: a text that, like an empty one, means no value.")
    var null: String?

    @Option(help: "csv, jsonl: the character between tags. Arrays of PostgreSQL and JSON are read, too. [default: ,]")
    var tagSeparator: String?

    @Option(help: "The form of times: auto, iso, seconds, milliseconds or microseconds. [default: auto]")
    var timeFormat: String?

    @Option(help: "The zone of times without one, as in +09:00. [default: UTC]")
    var utcOffset: String?

    @Option(help: "For rows without a time: when they were registered. [default: when the file was written]")
    var asOf: String?

    @Option(help: "For rows without a topic: the apns-topic header.")
    var topic: String?

    @Option(help: "For rows without an environment: production or sandbox.")
    var environment = "production"

    @Option(
        help: ArgumentHelp(
            "Another name of an environment in the file, as in development=sandbox. May be repeated.",
            valueName: "text=environment"))
    var environmentValue: [String] = []

    @Option(help: "The form of tokens: hex, or base64 as well. [default: hex; of sygnal: base64]")
    var tokenForm: TokenForm?

    @Option(
        help: ArgumentHelp(
            "sygnal: an app to import and its topic, with :sandbox for the sandbox. May be repeated; other apps are skipped.",
            valueName: "app_id=topic"))
    var app: [String] = []

    func validate() throws {
        try TopicOption.check(environment: environment)
        func only(_ option: String, _ isGiven: Bool, if fits: Bool) throws {
            if isGiven && !fits { throw ValidationError("\(option) does not go with --format \(format.rawValue).") }
        }
        try only("--column", !column.isEmpty, if: format.hasColumns)
        try only("--no-header", noHeader, if: format == .csv)
        try only("--delimiter", delimiter != nil, if: format.isCSV)
        try only("--null", null != nil, if: format.hasColumns || format.isCSV)
        try only("--tag-separator", tagSeparator != nil, if: format.hasColumns)
        try only("--environment-value", !environmentValue.isEmpty, if: format.hasColumns)
        try only("--time-format", timeFormat != nil, if: format.hasColumns)
        try only("--utc-offset", utcOffset != nil, if: format.hasColumns)
        try only("--app", !app.isEmpty, if: format == .sygnal)
        try only("--topic", topic != nil, if: format != .sygnal)
        switch format {
        case .sygnal where app.isEmpty:
            throw ValidationError("--format sygnal needs --app APP_ID=TOPIC: Synapse does not know the topic.")
        case .azure, .pnsfeedback, .appleFeedback:
            if topic == nil { throw ValidationError("--format \(format.rawValue) needs --topic: the file names none.") }
        default: break
        }
        if let fault = topic.flatMap(Topic.fault) { throw ValidationError("--topic \(fault).") }
        do {
            _ = try makeFormat()
            _ = try rules(asOf: .beforeAPNs, now: .now)
            if let asOf, try instant(asOf) > .now { throw ValidationError("--as-of is in the future.") }
        } catch let problem as ImportProblem {
            throw ValidationError("\(problem).")
        }
    }

    func makeFormat() throws(ImportProblem) -> any ImportFormat {
        switch format {
        case .csv: try CSVFormat(ColumnMapping(column), delimiter: delimiterByte(), hasHeader: !noHeader)
        case .jsonl: try JSONLinesFormat(ColumnMapping(column))
        case .appleFeedback: FeedbackTupleFormat()
        case .azure: ElementFormat.registrations
        case .pnsfeedback: ElementFormat.feedback
        case .sygnal: try CSVFormat(.pushers, delimiter: delimiterByte())
        }
    }

    /// - Parameter asOf: Unless it is given.
    func rules(asOf modified: Instant, now: Instant) throws(ImportProblem) -> ImportRules {
        var rules = ImportRules(
            asOf: try asOf.map { text throws(ImportProblem) in try instant(text) } ?? modified, latest: now)
        rules.queue = format.queue
        rules.topic = topic.map { Array($0.utf8) }
        rules.environment = Environment(rawValue: environment) ?? .production
        for option in environmentValue {
            let parts = option.split(separator: "=", maxSplits: 1).map(String.init)
            guard parts.count == 2, let environment = Environment(rawValue: parts[1]) else {
                throw ImportProblem(
                    "--environment-value is \"\(option)\", expected TEXT=production or TEXT=sandbox")
            }
            rules.environments[Array(parts[0].utf8)] = environment
        }
        guard let form = TimeText.Form(rawValue: timeFormat ?? defaultTimeForm.rawValue) else {
            throw ImportProblem(
                "--time-format is \"\(timeFormat ?? "")\", expected \(TimeText.Form.allCases.map(\.rawValue).joined(separator: ", "))"
            )
        }
        rules.time = TimeText(form: form, offset: try offset())
        rules.null = Array((null ?? "").utf8)
        rules.tagSeparator = try Self.byte(tagSeparator, "--tag-separator") ?? UInt8(ascii: ",")
        rules.isBase64 = (tokenForm ?? (format == .sygnal ? .base64 : .hex)) == .base64
        rules.apps = format == .sygnal ? try apps() : nil
        return rules
    }

    /// The formats that are no table have one.
    private var defaultTimeForm: TimeText.Form {
        switch format {
        case .appleFeedback: .seconds
        case .sygnal: .milliseconds
        case .pnsfeedback: .iso
        case .csv, .jsonl, .azure: .auto
        }
    }

    private func apps() throws(ImportProblem) -> [String: ImportRules.App] {
        var apps: [String: ImportRules.App] = [:]
        for option in app {
            let parts = option.split(separator: "=", maxSplits: 1).map(String.init)
            let scope = (parts.last ?? "").split(separator: ":", maxSplits: 1).map(String.init)
            guard parts.count == 2, let topic = scope.first, Topic(topic) != nil,
                let environment = Environment(rawValue: scope.count == 2 ? scope[1] : self.environment)
            else {
                throw ImportProblem("--app is \"\(option)\", expected APP_ID=TOPIC or APP_ID=TOPIC:sandbox")
            }
            apps[parts[0]] = (Array(topic.utf8), environment)
        }
        return apps
    }

    private func instant(_ text: String) throws(ImportProblem) -> Instant {
        guard let instant = TimeText.instant(text, offset: try offset()) else {
            throw ImportProblem("--as-of is \"\(text)\", expected an instant as in 2026-11-06T20:00:00Z")
        }
        return instant
    }

    private func offset() throws(ImportProblem) -> Int {
        guard let utcOffset else { return 0 }
        guard let offset = TimeText.offset(utcOffset) else {
            throw ImportProblem("--utc-offset is \"\(utcOffset)\", expected one as in +09:00")
        }
        return offset
    }

    private func delimiterByte() throws(ImportProblem) -> UInt8 {
        try Self.byte(delimiter, "--delimiter") ?? UInt8(ascii: ",")
    }

    private static func byte(_ text: String?, _ option: String) throws(ImportProblem) -> UInt8? {
        guard let text else { return nil }
        if text == "tab" { return UInt8(ascii: "\t") }
        guard text.utf8.count == 1, let byte = text.utf8.first, byte != .quote, byte != .newline else {
            throw ImportProblem("\(option) is \"\(text)\", expected one character or tab")
        }
        return byte
    }

    /// Tells apart what would read a file differently.
    func fingerprint(asOf: Instant, rejects: String) -> String {
        var hash = Fingerprint()
        let texts = [
            format.rawValue, noHeader ? "no header" : "", delimiter ?? "", null ?? "", tagSeparator ?? "",
            timeFormat ?? "",
            utcOffset ?? "", topic ?? "", environment, tokenForm?.rawValue ?? "", "\(asOf.microseconds)", rejects,
        ]
        for text in texts + column.sorted() + ["/"] + environmentValue.sorted() + ["/"] + app.sorted() {
            hash.add(text.utf8)
        }
        return hash.text
    }
}
