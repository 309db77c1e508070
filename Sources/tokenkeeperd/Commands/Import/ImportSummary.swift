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
    /// By cause, or reason.
    private var refusals: [String: Int] = [:]
    private var skips: [String: Int] = [:]
    /// The first refused records, for a dry run.
    private(set) var samples: [String] = []

    /// The causes come from the file: there may be any number of them.
    private static let mostKinds = 50
    private static let mostSamples = 10

    init(_ possible: [ImportField]) { self.possible = possible }

    /// What a row has.
    struct Traits {
        /// A bit for each field.
        var fields = 0
        var logsOut = false
    }

    /// - Parameter token: How long it is in hex.
    mutating func note(_ traits: Traits, token: Int) {
        rows += 1
        for index in fields.indices { fields[index] += traits.fields >> index & 1 }
        if traits.logsOut { logouts += 1 }
        if lengths[token] != nil || lengths.count < Self.mostKinds { lengths[token, default: 0] += 1 }
    }

    /// What a person should see before an import, such as a column that is always empty.
    ///
    /// - Parameter named: The fields of `--column`.
    func coverage(named: Set<ImportField>) -> [String] {
        let shown = possible.filter { $0 != .token && (named.contains($0) || fields[$0.rawValue] > 0) }
        return shown.map { "  \($0.name): in \(fields[$0.rawValue]) of \(counted(Int64(rows), "row", "rows"))" }
            + (logouts > 0 ? ["  logs out \(counted(Int64(logouts), "token", "tokens"))"] : [])
            + lengths.sorted { ($1.value, $0.key) < ($0.value, $1.key) }.prefix(3).map {
                "  tokens of \(counted(Int64($0.key), "hex digit", "hex digits")): \($0.value)"
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
