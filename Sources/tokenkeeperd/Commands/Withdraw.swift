internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Undoes a backfill or an import.
struct Withdraw: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Undo a backfill or an import, such as one under the wrong topic.",
        discussion: """
            Removes the tokens that it registered and nothing has touched since, and says why it keeps the others. The \
            source cannot be continued afterwards. Run it as the login that began the source, or with the rights of \
            tokenkeeper_operator. Without SOURCE, lists what can be undone.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Argument(help: "The number that the backfill or import printed.")
    var source: Int64?

    @Flag(help: "Only count.")
    var dryRun = false

    @Flag(help: "Without SOURCE: print JSON.")
    var json = false

    private static let rights = "the login that began the source, or tokenkeeper_operator"

    func validate() throws {
        if json, source != nil { throw ValidationError("--json lists what can be undone: leave out SOURCE.") }
    }

    func run() throws {
        let stop = ShutdownRequest.bySignal()
        let configuration = try options.load()
        try configuration.withLedger(writes: source != nil, as: Self.rights) { connection in
            guard let source else {
                let sources = try Withdrawal.sources(on: &connection)
                if json { return print(try JSONOutput.array(sources.map(Row.init))) }
                return print(
                    sources.isEmpty ? "there is nothing to undo" : sources.map(Self.text).joined(separator: "\n"))
            }
            var withdrawal = Withdrawal(of: source, isDryRun: dryRun)
            let total = try perform(&withdrawal, until: stop.request, on: &connection)
            print(Self.text(total, isDryRun: dryRun))
            if !total.isFinished {
                ConfigurationOptions.complain("stopped; continue with: tokenkeeperd withdraw \(source)")
                throw ExitCode(ExitStatus.failed.rawValue)
            }
            if total.kept > 0 { print(Self.text(try withdrawal.kept(on: &connection), of: source)) }
        }
        withExtendedLifetime(stop) {}
    }

    private func perform(
        _ withdrawal: inout Withdrawal, until stop: ShutdownRequest, on connection: inout Connection
    ) throws(DatabaseError) -> Withdrawal.Batch {
        var bar = ProgressBar("source \(withdrawal.sourceID)", items: "tokens", total: nil)
        defer { bar.finish() }
        let bell = Wakeup()
        stop.alsoRing(bell)
        var total = Withdrawal.Batch()
        var hasComplained = false
        while !stop.isAsked, !total.isFinished {
            let batch = try withdrawal.next(on: &connection)
            if batch.queued > 0, !dryRun {
                if !hasComplained {
                    bar.clear()
                    ConfigurationOptions.complain(
                        "waiting until a daemon has drained \(counted(batch.queued, "registration", "registrations")) of this source"
                    )
                    hasComplained = true
                }
                bar.wait(because: "waits for the queue")
                bell.wait(for: .milliseconds(250))
                continue
            }
            total.withdrawn += batch.withdrawn
            total.kept += batch.kept
            total.queued += batch.queued
            total.isFinished = batch.isFinished
            bar.advance(by: batch.withdrawn + batch.kept)
        }
        return total
    }

    private struct Row: Encodable {
        let sourceID: Int64
        let kind, name, startedAt, state: String
        let queued, refused: Int64

        init(_ source: Withdrawal.Source) {
            (sourceID, kind, name, state) = (source.sourceID, source.kind, source.name, source.state)
            (queued, refused, startedAt) = (source.queued, source.refused, JSONOutput.instant(source.startedAt))
        }
    }

    static func text(_ source: Withdrawal.Source) -> String {
        HistoryText.plain(
            "\(source.sourceID)  \(source.kind) of \(source.name), \(source.startedAt), \(source.state): "
                + "queued \(source.queued), refused \(source.refused)")
    }

    static func text(_ total: Withdrawal.Batch, isDryRun: Bool) -> String {
        var words = "\(isDryRun ? "would remove" : "removed") \(counted(total.withdrawn, "token", "tokens"))"
        if total.kept > 0 { words += "; \(isDryRun ? "would keep" : "kept") \(total.kept)" }
        if total.queued > 0 {
            words += "; \(counted(total.queued, "registration is", "registrations are")) still queued"
        }
        return words
    }

    static func text(_ kept: [Withdrawal.Kept], of source: Int64) -> String {
        let lines = kept.map { "  \($0.tokens)  \($0.reason)" }
        let all = "all of them: SELECT * FROM tokenkeeper.made_by(\(source)) WHERE kept_because IS NOT NULL"
        return (["kept, because:"] + lines + [all]).map(HistoryText.plain).joined(separator: "\n")
    }
}
