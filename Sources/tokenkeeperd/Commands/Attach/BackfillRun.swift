internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// A backfill to its end, or until a shutdown is requested, with a progress bar and a summary.
struct BackfillRun {
    let stop: ShutdownRequest

    /// Small enough for the locks and the memory of a transaction, large enough to be fast.
    private static let batchRows = 1000

    /// - Parameter name: That of the attachment, or of its table.
    /// - Throws: The exit status, if it did not come to the end.
    func perform(on name: String, _ connection: inout Connection) throws {
        let backfill = try Backfill(of: name, on: &connection)
        if backfill.resumes {
            print("continuing source \(backfill.sourceID) after \(counted(backfill.done, "row", "rows"))")
        }
        var bar = ProgressBar(
            backfill.name, items: "rows", total: backfill.estimated, steps: backfill.done, count: backfill.done)
        var total = Backfill.Batch()
        do {
            try queue(backfill, &total, &bar, on: &connection)
        } catch {
            bar.finish()
            print(Self.text(total, of: backfill))
            // What is wrong with the attachment or its table stays wrong.
            if error.sqlState != "22023" {
                ConfigurationOptions.complain("the backfill stopped; continue with: \(Self.command(backfill.name))")
            }
            throw error
        }
        bar.finish()
        print(Self.text(total, of: backfill))
        if !total.isFinished {
            ConfigurationOptions.complain("the backfill was stopped; continue with: \(Self.command(backfill.name))")
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
        var size = PageSize(most: Self.batchRows)
        try pace.wait(after: 0, &bar, on: &connection)
        while !stop.isAsked, !total.isFinished {
            do {
                let batch = try backfill.next(size.value, on: &connection)
                size.took(batch.rows)
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
            "queued \(counted(total.queued, "registration", "registrations")) of \(backfill.name) (source \(backfill.sourceID))"
        if backfill.resumes { words += " in this run" }
        if total.logouts > 0 { words += "; \(counted(total.logouts, "of them is a logout", "of them are logouts"))" }
        let left = total.rows - total.queued - total.failed
        if left > 0 {
            words += "; \(counted(left, "row says", "rows say")) nothing: no token, or left out by the filter"
        }
        if total.unreadable > 0 {
            words +=
                "; \(counted(total.unreadable, "token", "tokens")) cannot be read, and will be in tokenkeeper.rejected_registration"
        }
        if total.failed > 0 {
            words += "; \(counted(total.failed, "row", "rows")) could not be read: an expression fails for them"
        }
        return HistoryText.plain(words)
    }

    /// - Parameter name: That of the attachment.
    static func command(_ name: String) -> String { "tokenkeeperd backfill \(ShellWord.quoted(name))" }
}
