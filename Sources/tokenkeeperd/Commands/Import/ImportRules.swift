internal import TokenLedger
internal import TokenModel

/// What a row must be, and what is queued for it. Pure: only tokens that are not plain hex are left to the database, whose rule for
/// tokens is the only one.
struct ImportRules {
    /// What a text of a file means; the environment is nil if it does not say.
    typealias Scope = (topic: [UInt8], environment: Environment?)

    /// Where rows go.
    var queue = ImportSource.Queue.registration
    /// For rows without a topic; nil if the file must have them.
    var topic: [UInt8]?
    var environment = Environment.production
    /// What else a file may call the environments.
    var environments: [[UInt8]: Environment] = [:]
    /// What a file calls the topics; empty if it has the topics themselves.
    var topics: [[UInt8]: Scope] = [:]
    /// What is imported; all, if it is empty.
    var filters: [ImportFilter] = []
    /// For rows without a time.
    var asOf: Instant
    /// Whether `asOf` was given. When a file was written says nothing about when its tokens died.
    var isAsOfGiven = false
    /// Whether the file is a complete list. It says that a token is there: a row without a time does not say when it was registered, and so never
    /// revives one, as in an attached table.
    var isComplete = false
    /// A later time is a mistake: the clock or the time zone.
    var latest: Instant
    var time = TimeText()
    /// A cell with this text is empty.
    var null: [UInt8] = []
    var tagSeparator = UInt8(ascii: ",")
    var isBase64 = false
    /// Whether the database can hold every character.
    var holdsAll = true

    /// What has become of a row.
    enum Verdict: Equatable {
        case queued
        /// The row is written without the token, which is here in the row's bytes: the database has to read it, or other characters.
        case doubtful(Range<Int>)
        case skipped(String)
        case refused(Refusal)
    }

    /// No larger token is sent to the database to have it read.
    private static let longestTokenText = 8192

    /// Decides about a row, and writes it.
    ///
    /// - Parameters:
    ///   - sourceID: For `registration.source_id`, in digits.
    ///   - copy: Gets the row, unless it is skipped or refused. If the token is doubtful, the row ends before the token.
    func judge(_ row: ImportRow, sourceID: [UInt8], into copy: inout CopyText) -> Verdict {
        let start = copy.bytes.count
        do throws(Refused) {
            if let reason = skips(row) { return .skipped(reason) }
            guard let token = value(.token, row) else { throw Refused(row.absence ?? "the token is empty") }
            if let field = row.repeated { throw Refused("\(field.name) is there twice") }
            if row.hasEmptyReason { throw Refused("the reason is empty: APNs may have accepted the push") }
            try writeScope(row, into: &copy)
            let instant = try instant(row)
            if instant < .beforeAPNs, queue == .result || value(.registeredAt, row) != nil {
                throw Refused("the time is before 2008, when APNs did not exist", ancient(row))
            }
            switch queue {
            case .registration:
                copy.instant(instant)
                try writeText(.deviceID, row, into: &copy)
                try writeText(.userID, row, into: &copy)
                try writeTags(row, into: &copy)
                copy.plain(try isUnregistered(row) ? [UInt8(ascii: "t")] : [UInt8(ascii: "f")])
                copy.plain(sourceID)
            case .result:
                writeResult(row, at: instant, into: &copy)
            }
            if isPlainHex(row.bytes, token), holdsAll || copy.isASCII(from: start) {
                copy.plain(row.bytes[token])
                copy.endRow()
                return .queued
            }
            guard token.count <= Self.longestTokenText else {
                throw Refused("the token is no token", "\(token.count) bytes long")
            }
            try checkUTF8(.token, row.bytes, token)
            return .doubtful(token)
        } catch {
            copy.cut(to: start)
            return .refused(error.refusal)
        }
    }

    struct Refused: Error {
        let refusal: Refusal

        init(_ kind: String, _ detail: String? = nil) { refusal = Refusal(kind, detail) }
    }

    /// What needs no second look. In base64, fewer than 32 hex digits may be something else: see `tokenkeeper.parse_token`.
    private func isPlainHex(_ bytes: [UInt8], _ range: Range<Int>) -> Bool {
        guard range.count.isMultiple(of: 2), range.count <= 2 * DeviceToken.maximumLength,
            !isBase64 || range.count >= 32
        else { return false }
        for place in range where bytes[place].hexValue == nil { return false }
        return true
    }

    /// The value, unless it is the text for null.
    func value(_ field: ImportField, _ row: ImportRow) -> Range<Int>? {
        guard let range = row[field], !isNull(row.bytes, range) else { return nil }
        return range
    }

    private func isNull(_ bytes: [UInt8], _ range: Range<Int>) -> Bool {
        !null.isEmpty && range.count == null.count
            && Bytes.has(null, in: bytes, at: range.lowerBound, to: range.upperBound)
    }

    /// Why a row is not imported, and not refused either.
    private func skips(_ row: ImportRow) -> String? {
        for (index, filter) in filters.enumerated() {
            let range = row[filter: index].flatMap { isNull(row.bytes, $0) ? nil : $0 }
            if !filter.values.contains(where: { $0.elementsEqual(row.bytes[range ?? 0..<0]) }) {
                let value = range.map { "\"\(Self.shown(row, $0))\"" } ?? "empty"
                return "\(filter.column.prefix(60)) is \(value)"
            }
        }
        if queue == .result, let range = value(.reason, row), Feedback(reason: row.word(range)) == nil {
            return "reason \(Self.shown(row, range)): says nothing about the token"
        }
        return nil
    }

    private func writeScope(_ row: ImportRow, into copy: inout CopyText) throws(Refused) {
        var topic = topic ?? []
        var environment = environment
        if let range = value(.environment, row) {
            guard let known = self.environment(row.bytes, range) else {
                throw Refused(
                    "the environment is unknown",
                    "\"\(Self.shown(row, range))\", expected production or sandbox; see --environment-value")
            }
            environment = known
        }
        if let range = value(.topic, row) {
            topic = Array(row.bytes[range])
            if let known = topics[topic] {
                topic = known.topic
                environment = known.environment ?? environment
            } else if !topics.isEmpty {
                throw Refused("the topic is not named with --topic-value", "\"\(Self.shown(row, range))\"")
            }
            guard Topic.isTopic(topic.span) else {
                try checkUTF8(.topic, row.bytes, range)
                throw Refused("the topic is no apns-topic header", Topic.fault(of: row.word(range)).map { "it \($0)" })
            }
        }
        if topic.isEmpty { throw Refused("the topic is missing; see --topic") }
        copy.plain(environment.rawValue.utf8)
        copy.text(topic, 0..<topic.count)
    }

    private func environment(_ bytes: [UInt8], _ range: Range<Int>) -> Environment? {
        // The usual words without an allocation.
        if range.count == 10, Bytes.has(Self.production, in: bytes, at: range.lowerBound, to: range.upperBound) {
            return .production
        }
        if range.count == 7, Bytes.has(Self.sandbox, in: bytes, at: range.lowerBound, to: range.upperBound) {
            return .sandbox
        }
        return environments[Array(bytes[range])]
    }

    private static let production = Array("production".utf8)
    private static let sandbox = Array("sandbox".utf8)

    /// Which field has a row's time.
    private var timed: ImportField { queue == .registration ? .registeredAt : .timestamp }

    private func instant(_ row: ImportRow) throws(Refused) -> Instant {
        guard let range = value(timed, row) else {
            if queue == .result, !isAsOfGiven { throw Refused("the timestamp is missing; see --as-of") }
            return isComplete ? Instant(microseconds: 0) : asOf
        }
        guard let instant = time.instant(row.bytes, range) else {
            throw Refused(
                "the time cannot be read", "\"\(Self.shown(row, range))\", expected \(Self.expected[time.form] ?? "")")
        }
        guard instant <= latest else {
            throw Refused(
                "the time is in the future; see --time-zone and --time-format", "\"\(Self.shown(row, range))\"")
        }
        return instant
    }

    private static let expected: [TimeText.Form: String] = [
        .auto: "ISO 8601 or a Unix time", .iso: "ISO 8601", .seconds: "seconds since 1970",
        .milliseconds: "milliseconds since 1970", .microseconds: "microseconds since 1970",
    ]

    private func writeText(_ field: ImportField, _ row: ImportRow, into copy: inout CopyText) throws(Refused) {
        guard let range = value(field, row) else { return copy.null() }
        try checkUTF8(field, row.bytes, range)
        copy.text(row.bytes, range)
    }

    private func writeTags(_ row: ImportRow, into copy: inout CopyText) throws(Refused) {
        var source = row.bytes
        let tags: [Range<Int>]
        if let list = row.tagList {
            tags = list
        } else if let range = value(.tags, row) {
            guard let list = TagText(separator: tagSeparator).tags(&source, range) else {
                throw Refused("tags is not a list; to leave it out: --column tags=")
            }
            tags = list
        } else {
            return copy.null()
        }
        for tag in tags { try checkUTF8(.tags, source, tag) }
        copy.array(source, tags)
    }

    func isUnregistered(_ row: ImportRow) throws(Refused) -> Bool {
        if try flag(.unregistered, row) == true { return true }
        return try flag(.active, row) == false
    }

    /// What a time before APNs probably is.
    private func ancient(_ row: ImportRow) -> String? {
        guard let range = value(timed, row) else { return nil }
        let shown = "\"\(Self.shown(row, range))\""
        return switch Double(row.word(range)) ?? 0 {
        // 2008 to 2036.
        case 220_000_000..<1_104_000_000: "\(shown): seconds since 2001, as Swift writes them, perhaps"
        case 39_000..<60_000: "\(shown): days since 1899, as a spreadsheet writes them, perhaps"
        default: shown
        }
    }

    private func flag(_ field: ImportField, _ row: ImportRow) throws(Refused) -> Bool? {
        guard let range = value(field, row) else { return nil }
        switch row.word(range).lowercased() {
        case "t", "true", "1", "y", "yes", "on": return true
        case "f", "false", "0", "n", "no", "off": return false
        default:
            throw Refused("\(field.name) is neither true nor false", "\"\(Self.shown(row, range))\"")
        }
    }

    /// What APNs has said.
    private func writeResult(_ row: ImportRow, at instant: Instant, into copy: inout CopyText) {
        let feedback = value(.reason, row).map(row.word).flatMap(Feedback.init(reason:)) ?? Feedback()
        copy.plain("\(feedback.status)".utf8)
        let timestamp = feedback.status == 410 ? ",\"timestamp\":\(instant.microseconds / 1000)" : ""
        copy.plain("{\"reason\":\"\(feedback.reason)\"\(timestamp)}".utf8)
        copy.instant(instant)
    }

    /// A response that says that a token is bad.
    private struct Feedback {
        var status = 410
        var reason = "Unregistered"

        init() {}

        init?(reason: String) {
            switch reason {
            case "Unregistered", "ExpiredToken": status = 410
            case "BadDeviceToken", "DeviceTokenNotForTopic": status = 400
            default: return nil
            }
            self.reason = reason
        }
    }

    /// PostgreSQL would refuse the whole batch.
    private func checkUTF8(_ field: ImportField, _ bytes: [UInt8], _ range: Range<Int>) throws(Refused) {
        var isASCII = true
        for place in range {
            if bytes[place] == 0 { throw Refused("\(field.name) contains a zero byte") }
            if bytes[place] >= 0x80 { isASCII = false }
        }
        if !isASCII, String(validating: bytes[range], as: UTF8.self) == nil {
            throw Refused("\(field.name) is not UTF-8")
        }
    }

    /// The beginning of a value that is no token.
    private static func shown(_ row: ImportRow, _ range: Range<Int>) -> String {
        let text = DeviceToken.cut(in: HistoryText.plain(String(row.word(range).prefix(40))))
        return range.count > 40 ? text + "…" : text
    }
}
