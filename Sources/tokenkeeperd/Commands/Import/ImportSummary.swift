internal import TokenLedger
internal import TokenModel

/// What an import has done, for people. Pure.
struct ImportSummary {
    /// What a row may have.
    let possible: [ImportField]
    private(set) var queued = 0
    private(set) var refused = 0
    private(set) var skipped = 0
    /// Of the rows that were not refused: how many have each field, and are logouts; and how long their tokens are, in hex.
    private var rows = 0
    private var fields = [Int](repeating: 0, count: ImportField.allCases.count)
    private var logouts = 0
    private var lengths: [Int: Int] = [:]
    /// The topics that rows name.
    private var topics: [[UInt8]: Int] = [:]
    /// By cause, or reason.
    private var refusals: [String: Int] = [:]
    private var skips: [String: Int] = [:]
    /// The first refused records, for a dry run.
    private(set) var samples: [String] = []

    /// The causes come from the file: there may be any number of them.
    private static let mostKinds = 50
    private static let mostSamples = 10
    private static let mostShown = 10

    init(_ possible: [ImportField]) { self.possible = possible }

    /// What a row has.
    struct Traits {
        /// A bit for each field.
        var fields = 0
        var logsOut = false
        /// That the row names.
        var topic: [UInt8]?
    }

    /// - Parameter token: How long it is in hex.
    mutating func note(_ traits: Traits, token: Int) {
        rows += 1
        for index in fields.indices { fields[index] += traits.fields >> index & 1 }
        if traits.logsOut { logouts += 1 }
        if lengths[token] != nil || lengths.count < Self.mostKinds { lengths[token, default: 0] += 1 }
        if let topic = traits.topic, topics[topic] != nil || topics.count < Self.mostKinds {
            topics[topic, default: 0] += 1
        }
    }

    /// What a person should see of the rows, such as a column that is always empty.
    ///
    /// - Parameters:
    ///   - named: The fields of `--column`.
    ///   - timeless: What rows without a time count as.
    func coverage(named: Set<ImportField>, timeless: String) -> [String] {
        if rows == 0 { return [] }
        let shown = possible.filter { $0 != .token && ($0.isTime || named.contains($0) || fields[$0.rawValue] > 0) }
        let covered = shown.map { field in
            let count = fields[field.rawValue]
            let others = field.isTime && count < rows ? "; rows without it count as \(timeless)" : ""
            return "  \(field.name): in \(count) of \(counted(rows, "row", "rows"))\(others)"
        }
        let doubt = logouts > 5 && logouts * 2 > rows ? ": is this the flag of those that are active?" : ""
        return covered + topicLines + (logouts > 0 ? ["  logs out \(counted(logouts, "token", "tokens"))\(doubt)"] : [])
            + lengthLines
    }

    private var topicLines: [String] {
        let shown = Self.mostFrequent(topics.map { (value: String(decoding: $0.key, as: UTF8.self), count: $0.value) })
        let others = fields[ImportField.topic.rawValue] - shown.reduce(0) { $0 + $1.count }
        return shown.map { "  topic \($0.value): \($0.count)" } + (others > 0 ? ["  other topics: \(others)"] : [])
    }

    private var lengthLines: [String] {
        let shown = Self.mostFrequent(lengths.map { (value: $0.key, count: $0.value) })
        let others = rows - shown.reduce(0) { $0 + $1.count }
        return shown.map { "  tokens of \(counted($0.value, "hex digit", "hex digits")): \($0.count)" }
            + (others > 0 ? ["  tokens of other lengths: \(others)"] : [])
    }

    private static func mostFrequent<Value: Comparable>(
        _ counts: [(value: Value, count: Int)]
    ) -> ArraySlice<(value: Value, count: Int)> {
        counts.sorted { ($1.count, $0.value) < ($0.count, $1.value) }.prefix(mostShown)
    }

    /// Topics that are no bundle ID, and so probably the file's own names.
    var oddTopics: [String] {
        let odd = topics.keys.filter { !$0.contains(UInt8(ascii: ".")) }.map { String(decoding: $0, as: UTF8.self) }
        return odd.sorted().prefix(Self.mostShown).map {
            let word = ShellWord.quoted($0)
            return
                "warning: the topic '\($0)' is no bundle ID: say which it means, as in --topic-value \(word)=com.example.\(word)"
        }
    }

    /// The named fields that no row has.
    func missing(named: Set<ImportField>) -> [String] {
        rows == 0
            ? skipped > 0 && refused == 0 ? ["warning: no row passes --filter"] : []
            : possible.filter { named.contains($0) && fields[$0.rawValue] == 0 }.map {
                "warning: \($0.name) is in none of \(counted(Int64(rows), "row", "rows")): check the name in --column"
            }
    }

    mutating func queue(_ rows: Int) { queued += rows }

    mutating func refuse(_ refusal: Refusal, item: String, number: Int64) {
        refused += 1
        Self.count(refusal.kind, in: &refusals)
        if samples.count < Self.mostSamples { samples.append("\(item) \(number): \(refusal.text)") }
    }

    mutating func skip(_ reason: String) {
        skipped += 1
        Self.count(reason, in: &skips)
    }

    private static func count(_ kind: String, in counts: inout [String: Int]) {
        counts[counts[kind] != nil || counts.count < mostKinds ? kind : "other causes", default: 0] += 1
    }

    /// The lines about what was refused and skipped, the most frequent first.
    var details: [String] {
        Self.lines(refusals, "refused") + Self.lines(skips, "skipped")
            + (refusals.keys.contains { $0.hasSuffix("Firebase Cloud Messaging") }
                ? ["  the file has rows of another platform: leave them out with --filter COLUMN=VALUE"] : [])
    }

    private static func lines(_ counts: [String: Int], _ word: String) -> [String] {
        counts.sorted { ($1.value, $0.key) < ($0.value, $1.key) }.map {
            "  \(word) \($0.value): \(HistoryText.plain($0.key))"
        }
    }
}
