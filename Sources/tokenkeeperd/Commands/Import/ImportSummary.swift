/// What an import has done, for people. Pure.
struct ImportSummary {
    private(set) var queued = 0
    private(set) var refused = 0
    private(set) var skipped = 0
    /// By cause, or reason.
    private var refusals: [String: Int] = [:]
    private var skips: [String: Int] = [:]
    /// The first refused records, for a dry run.
    private(set) var samples: [String] = []

    /// The causes come from the file: there may be any number of them.
    private static let mostKinds = 50
    private static let mostSamples = 10

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
    }

    private static func lines(_ counts: [String: Int], _ word: String) -> [String] {
        counts.sorted { ($1.value, $0.key) < ($0.value, $1.key) }.map {
            "  \(word) \($0.value): \(HistoryText.plain($0.key))"
        }
    }
}
