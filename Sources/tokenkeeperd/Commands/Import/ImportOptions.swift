internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// How a file is read: the options of `import`.
struct ImportOptions: ParsableArguments {
    /// What a file may be.
    enum Format: String, ExpressibleByArgument, CaseIterable {
        case csv, json
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
            "csv, or json: an object on each line, or an array of objects.", valueName: "format"))
    var format: Format

    @Flag(
        help:
            "Each row is what APNs said of a token: a 410 with its timestamp, or the reason BadDeviceToken or DeviceTokenNotForTopic."
    )
    var feedback = false

    @Option(
        help: ArgumentHelp(
            "The column or key of token, topic, environment, registered_at, device_id, user_id, tags, unregistered, or active (the opposite; only if named); with --feedback, of token, topic, environment, timestamp or reason. Of json also a path, as in token.apn. Empty: none. May be repeated. [default: the field's name]",
            valueName: "field=column"))
    var column: [String] = []

    @Option(
        help: ArgumentHelp(
            "Only rows whose column or key has this value; empty means no value. Of one column, any of its values; of several columns, all. May be repeated.",
            valueName: "column=value"))
    var filter: [String] = []

    @Flag(help: "csv: the file has no header; --column and --filter count columns from 1.")
    var noHeader = false

    @Option(help: "csv: the character between cells, or tab. [default: ,]")
    var delimiter: String?

    @Option(help: "A text that, like an empty one, means no value.")
    var null: String?

    @Option(help: "The character between tags. Arrays of PostgreSQL and JSON are read, too. [default: ,]")
    var tagSeparator: String?

    @Option(help: "The form of times: auto, iso, seconds, milliseconds or microseconds.")
    var timeFormat = "auto"

    @Option(
        parsing: .unconditional, help: "The zone of times without one, as in Asia/Tokyo or +09:00. [default: UTC]")
    var timeZone: String?

    @Option(
        help:
            "For rows without a time: when they were registered, or died. [default: when the file was written; none with --feedback, which then refuses such rows]"
    )
    var asOf: String?

    @Option(
        help: ArgumentHelp(
            "The file has all tokens of this list. Those that an earlier file had and this one lacks are logged out, as of --as-of, and those that come back are logged in again.",
            valueName: "list"))
    var complete: String?

    @Option(help: "For rows without a topic.")
    var topic: String?

    @Option(
        help: ArgumentHelp(
            "What the file calls a topic, as in 7=com.example.app or test=com.example.app:sandbox. Then it must name each topic of the file. May be repeated.",
            valueName: "text=topic"))
    var topicValue: [String] = []

    @Option(help: "For rows without an environment: production or sandbox.")
    var environment = "production"

    @Option(
        help: ArgumentHelp(
            "Another name of an environment in the file, as in development=sandbox. May be repeated.",
            valueName: "text=environment"))
    var environmentValue: [String] = []

    @Option(help: "The form of tokens: hex, or base64 as well.")
    var tokenForm = TokenForm.hex

    var queue: ImportSource.Queue { feedback ? .result : .registration }

    func validate() throws {
        try TopicOption.check(environment: environment)
        if format != .csv, noHeader || delimiter != nil {
            throw ValidationError("--\(noHeader ? "no-header" : "delimiter") goes with --format csv only.")
        }
        if feedback, complete != nil { throw ValidationError("--complete goes with registrations, not --feedback.") }
        if let fault = topic.flatMap(Topic.fault) { throw ValidationError("--topic \(fault).") }
        do {
            _ = try makeFormat()
            _ = try rules(asOf: .beforeAPNs, now: .now, in: try knownZone())
        } catch {
            throw ValidationError("\(error).")
        }
    }

    func mapping() throws(ImportProblem) -> ColumnMapping { try ColumnMapping(column, filters: filter, of: queue) }

    func makeFormat() throws(ImportProblem) -> any ImportFormat {
        switch format {
        case .csv: try CSVFormat(mapping(), delimiter: delimiterByte(), hasHeader: !noHeader)
        case .json: try JSONFormat(mapping())
        }
    }

    /// - Parameters:
    ///   - asOf: Unless it is given.
    ///   - zone: Nil if it is not known yet: then nothing depends on it.
    func rules(asOf modified: Instant, now: Instant, in zone: LocalTime?) throws(ImportProblem) -> ImportRules {
        var rules = ImportRules(asOf: try instant(in: zone ?? .utc) ?? modified, latest: now)
        if asOf != nil, zone != nil, rules.asOf > now { throw ImportProblem("--as-of is in the future") }
        rules.isAsOfGiven = asOf != nil
        rules.queue = queue
        rules.isComplete = complete != nil
        rules.filters = try mapping().filters
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
        for option in topicValue {
            let (text, scope) = try Self.topicValue(option)
            rules.topics[text] = scope
        }
        guard let form = TimeText.Form(rawValue: timeFormat) else {
            throw ImportProblem(
                "--time-format is \"\(timeFormat)\", expected \(TimeText.Form.allCases.map(\.rawValue).joined(separator: ", "))"
            )
        }
        rules.time = TimeText(form: form, zone: zone ?? .utc)
        rules.null = Array((null ?? "").utf8)
        rules.tagSeparator = try Self.byte(tagSeparator, "--tag-separator") ?? UInt8(ascii: ",")
        rules.isBase64 = tokenForm == .base64
        return rules
    }

    private static func topicValue(_ option: String) throws(ImportProblem) -> ([UInt8], ImportRules.Scope) {
        let parts = option.split(separator: "=", maxSplits: 1).map(String.init)
        let scope = (parts.last ?? "").split(separator: ":", maxSplits: 1).map(String.init)
        let environment = scope.count == 2 ? Environment(rawValue: scope[1]) : nil
        guard parts.count == 2, let topic = scope.first, Topic(topic) != nil, (scope.count == 2) == (environment != nil)
        else {
            throw ImportProblem("--topic-value is \"\(option)\", expected TEXT=TOPIC or TEXT=TOPIC:sandbox")
        }
        return (Array(parts[0].utf8), (Array(topic.utf8), environment))
    }

    private func instant(in zone: LocalTime) throws(ImportProblem) -> Instant? {
        guard let asOf else { return nil }
        guard let instant = TimeText.instant(asOf, in: zone) else {
            throw ImportProblem("--as-of is \"\(asOf)\", expected an instant as in 2026-11-06T20:00:00Z")
        }
        return instant
    }

    /// The zone of times without one; nil if only the server knows it, by its name.
    func knownZone() throws(ImportProblem) -> LocalTime? {
        guard let timeZone else { return .utc }
        guard timeZone.hasPrefix("+") || timeZone.hasPrefix("-") else { return nil }
        guard let offset = TimeText.offset(timeZone) else {
            throw ImportProblem(
                "--time-zone is \"\(timeZone)\", expected a name as in Asia/Tokyo, or an offset as in +09:00")
        }
        return LocalTime(offset: offset)
    }

    func zone(on connection: inout Connection) throws -> LocalTime {
        if let known = try knownZone() { return known }
        let offsets = try TimeZoneOffsets.read(timeZone ?? "", on: &connection)
        guard !offsets.isEmpty else {
            throw ImportProblem(
                "--time-zone is \"\(timeZone ?? "")\", which is no time zone: expected a name as in Asia/Tokyo")
        }
        return LocalTime(
            offsets.enumerated().map { LocalTime.Offset(since: $0 == 0 ? .min : $1.since, seconds: $1.seconds) })
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
            format.rawValue, feedback ? "feedback" : "", noHeader ? "no header" : "", delimiter ?? "", null ?? "",
            tagSeparator ?? "", timeFormat, timeZone ?? "", topic ?? "", environment, tokenForm.rawValue,
            "\(asOf.microseconds)", rejects, complete ?? "",
        ]
        let lists = [column, filter, topicValue, environmentValue]
        for text in texts + lists.flatMap({ $0.sorted() + ["/"] }) { hash.add(text.utf8) }
        return hash.text
    }
}
