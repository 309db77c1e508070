internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// A check of an attached table to its end, with a progress bar and a summary.
struct CheckRun {
    let stop: ShutdownRequest
    /// Whether to queue what repairs the differences.
    let repairs: Bool

    /// So many examples of each kind are printed.
    private static let examples = 3

    /// - Parameters:
    ///   - reader: The session that reads the table, in one snapshot.
    ///   - writer: Another one, which repairs.
    /// - Throws: The exit status, if there are differences, or if it did not come to the end.
    func perform(on name: String, _ reader: inout Connection, _ writer: inout Connection) throws {
        let check = try TableCheck(of: name, on: &writer)
        var bar = ProgressBar(check.name, items: "rows", total: check.estimated)
        var rows: Int64 = 0
        var (failed, repaired): (Int64, Int64) = (0, 0)
        var found: [String: (count: Int64, examples: [String])] = [:]
        var pace = QueuePace(stop: stop)
        let isFinished: Bool
        do {
            isFinished = try check.perform(on: &reader) { page in
                rows += page.rows
                failed += page.failed
                for difference in page.differences {
                    var kind = found[difference.difference] ?? (0, [])
                    kind.count += 1
                    if kind.examples.count < Self.examples { kind.examples.append(Self.text(difference)) }
                    found[difference.difference] = kind
                }
                if repairs, !page.differences.isEmpty { repaired += try check.repair(page, on: &writer) }
                bar.advance(by: page.rows)
                if repairs { try pace.wait(after: Int64(page.differences.count), &bar, on: &writer) }
                return !stop.isAsked
            }
        } catch {
            bar.finish()
            throw error
        }
        bar.finish()
        guard isFinished else {
            ConfigurationOptions.complain("the check was stopped")
            throw ExitCode(ExitStatus.failed.rawValue)
        }
        let differences = found.values.reduce(0) { $0 + $1.count }
        try check.end(differences: differences, repaired: repaired, on: &writer)
        print(Self.text(rows, of: check, differences))
        for (words, kind) in found.sorted(by: { ($1.value.count, $0.key) < ($0.value.count, $1.key) }) {
            print(HistoryText.plain("  \(kind.count)  \(words): \(kind.examples.joined(separator: "; "))"))
        }
        if failed > 0 { print("  \(counted(failed, "row", "rows")) could not be read: an expression fails for them") }
        if repairs, repaired > 0 {
            print(
                "queued \(counted(repaired, "registration or logout that repairs", "registrations and logouts that repair")) this; to undo logouts: tokenkeeperd reinstate"
            )
        }
        if failed > 0 || (differences > 0 && !repairs) { throw ExitCode.failure }
    }

    static func text(_ rows: Int64, of check: TableCheck, _ differences: Int64) -> String {
        let words = differences == 0 ? "agree" : "differ in \(counted(differences, "token", "tokens"))"
        return HistoryText.plain("\(check.name) (\(counted(rows, "row", "rows"))) and the ledger \(words)")
    }

    static func text(_ difference: TableCheck.Difference) -> String {
        "\(difference.row.map { "row \(HistoryText.withoutTokens($0)), " } ?? "")\(difference.token.prefix(8))... of \(difference.topic)"
    }
}
