internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// A backfill to its end, or until a shutdown is requested, with a progress bar and a summary.
struct BackfillRun {
    let stop: ShutdownRequest

    /// Small enough for the locks and the memory of a transaction, large enough to be fast.
    private static let batchRows = 1000

    /// - Parameter table: The schema and name.
    /// - Throws: The exit status, if it did not come to the end.
    func perform(on table: String, _ connection: inout Connection) throws {
        let backfill = try Backfill(of: table, on: &connection)
        if backfill.resumes {
            print("continuing source \(backfill.sourceID) after \(counted(backfill.done, "row", "rows"))")
        }
        var bar = ProgressBar(
            table, items: "rows", total: backfill.estimated, steps: backfill.done, count: backfill.done)
        var total = Backfill.Batch()
        do {
            try queue(backfill, &total, &bar, on: &connection)
        } catch {
            bar.finish()
            print(Self.text(total, of: backfill))
            ConfigurationOptions.complain("the backfill stopped; continue with: \(Self.command(table))")
            throw error
        }
        bar.finish()
        print(Self.text(total, of: backfill))
        let refusals = total.refused > 0 ? try backfill.refusals(on: &connection) : []
        if !refusals.isEmpty { print(Self.text(refusals, of: backfill)) }
        if !total.isFinished {
            ConfigurationOptions.complain("the backfill was stopped; continue with: \(Self.command(table))")
            throw ExitCode(ExitStatus.failed.rawValue)
        }
        print("to undo it: tokenkeeperd withdraw \(backfill.sourceID)")
    }

    private func queue(
        _ backfill: Backfill, _ total: inout Backfill.Batch, _ bar: inout ProgressBar, on connection: inout Connection
    ) throws(DatabaseError) {
        var pace = QueuePace(stop: stop)
        var backoff = Backoff(from: .milliseconds(100), to: .seconds(5))
        var failures = 0
        try pace.wait(after: 0, &bar, on: &connection)
        while !stop.isAsked, !total.isFinished {
            do {
                let batch = try backfill.next(Self.batchRows, on: &connection)
                total += batch
                bar.advance(by: batch.rows)
                (failures, backoff) = (0, Backoff(from: .milliseconds(100), to: .seconds(5)))
                try pace.wait(after: batch.rows, &bar, on: &connection)
            } catch {
                // Somebody has locked the table, or the server is busy.
                failures += 1
                if error.remedy != .retry || failures > 20 { throw error }
                bar.wait(because: "waits for a lock")
                pace.rest(for: backoff.next())
            }
        }
    }

    static func text(_ total: Backfill.Batch, of backfill: Backfill) -> String {
        var words =
            "queued \(counted(total.queued, "registration", "registrations")) of \(backfill.table) (source \(backfill.sourceID))"
        if backfill.resumes { words += " in this run" }
        if total.stale > 0 { words += ", \(total.stale) of them with a 410" }
        if total.withoutToken > 0 { words += "; \(counted(total.withoutToken, "row has", "rows have")) no token" }
        if total.refused > 0 { words += "; refused \(counted(total.refused, "row", "rows"))" }
        return HistoryText.plain(words)
    }

    static func text(_ refusals: [Backfill.Refusal], of backfill: Backfill) -> String {
        let lines = refusals.prefix(20).map { refusal in
            "  \(refusal.rows)  such as row \(refusal.samples.joined(separator: ", ")): \(refusal.error)"
        }
        let all =
            "all of them, as a member of tokenkeeper_reader: SELECT error, token FROM tokenkeeper.rejected_registration WHERE source_id = \(backfill.sourceID)"
        return (["refused, by error:"] + lines + [all]).map(HistoryText.plain).joined(separator: "\n")
    }

    static func command(_ table: String) -> String { "tokenkeeperd backfill \(ShellWord.quoted(table))" }
}
