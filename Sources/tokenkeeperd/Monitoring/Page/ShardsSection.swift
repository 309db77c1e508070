internal import TokenLedger
internal import TokenModel

/// All shards on the status page: a row for each, and their sum. Pure.
struct ShardsSection {
    /// Nil while the first look is under way.
    let found: ShardSurvey.Found?
    /// The shard whose daemon serves the page; nil if it is not known yet.
    let own: Int?

    /// A column of counts.
    private struct Column: Sendable {
        let heading: String
        /// Whether 10,000 means 10,000 or more.
        let isCapped: Bool
        let value: @Sendable (ShardStatus.Counts) -> Int64?

        init(_ heading: String, isCapped: Bool = false, _ value: @escaping @Sendable (ShardStatus.Counts) -> Int64?) {
            self.heading = heading
            self.isCapped = isCapped
            self.value = value
        }

        /// The sum over some shards. A shard whose count is unknown or capped makes it a lower bound.
        func cell(_ counts: [ShardStatus.Counts], isEstimated: Bool = false) -> HTML {
            let known = counts.compactMap(value)
            if known.isEmpty { return "<td class=\"number\">–</td>" }
            let isLeast = known.count < counts.count || isCapped && known.contains(10_000)
            return
                "<td class=\"number\">\(isEstimated ? "about " : "")\(Figures.count(known.reduce(0, +)))\(isLeast ? " or more" : "")</td>"
        }
    }

    private static let columns = [
        Column("Results queued") { $0.queueDepth },
        Column("Held", isCapped: true) { $0.held },
        Column("Rejected", isCapped: true) { $0.rejected },
        Column("Requests in the outbox", isCapped: true) { $0.requests },
        Column("Requests failed", isCapped: true) { $0.failedSends },
        Column("Active tokens") { $0.active },
        Column("Suppressed") { $0.suppressed },
        Column("Live daemons") { $0.liveDaemons },
    ]

    /// What a person should look at, each with the numbers of the shards that say so.
    ///
    /// - Parameter warnings: What this daemon's own shard says, which was read later.
    func problems(critical: Bool, own warnings: [String]) -> [String] {
        guard let found else { return warnings }
        var missing: [String] = []
        var said: [(shard: Int, value: String)] = []
        for shard in found.shards {
            switch shard.answer {
            // If it does not answer, the page says so in other words.
            case _ where shard.number == own: said += warnings.map { (shard.number, $0) }
            case .missing(let reason): missing.append("shard \(shard.number) does not answer: \(reason)")
            case .counts(let counts):
                let warnings =
                    critical ? counts.warnings.prefix(counts.critical) : counts.warnings.dropFirst(counts.critical)
                said += warnings.map { (shard.number, $0) }
            }
        }
        return (critical ? missing : [])
            + ShardOutput.grouped(said).map { "\(ShardOutput.numbered($0.shards)): \($0.value)" }
    }

    var html: HTML {
        guard let found else {
            return "<section><h2>All shards</h2><p class=\"muted\">The shards are being asked.</p></section>"
        }
        let answers = found.shards.compactMap { shard -> ShardStatus.Counts? in
            if case .counts(let counts) = shard.answer { counts } else { nil }
        }
        let isWhole = answers.count == found.shards.count
        let all = isWhole ? "all \(answers.count)" : "\(answers.count) of \(found.shards.count): those that answer"
        let rows = found.shards.map { shard -> HTML in
            let name = shard.number == own ? "\(shard.number), this one" : "\(shard.number)"
            return switch shard.answer {
            case .counts(let counts): row(name, [counts])
            case .missing(let reason):
                "<tr><td>\(name)</td><td class=\"name\" colspan=\"\(Self.columns.count + 2)\">does not answer: \(reason)</td></tr>"
            }
        }
        return """
            <section><h2>All shards</h2><div class="scroll"><table>
            <tr><th>Shard</th><th class="number">Warnings</th>\(Self.columns.prefix(1).map(heading))<th class="number">Oldest waits</th>\
            \(Self.columns.dropFirst().map(heading))</tr>
            \(row(all, answers))\(rows)</table></div>
            <p class="muted">Read at \(Figures.text(found.at)). Everything below is of this daemon's shard only.</p></section>
            """
    }

    private func heading(_ column: Column) -> HTML { "<th class=\"number\">\(column.heading)</th>" }

    private func row(_ name: String, _ counts: [ShardStatus.Counts]) -> HTML {
        let warnings = counts.reduce(0) { $0 + $1.warnings.count }
        let oldest = counts.compactMap(\.oldestResultAge).max().map(Figures.age) ?? "–"
        return """
            <tr><td class="name">\(name)</td><td class="number">\(warnings)</td>\
            \(Self.columns.prefix(1).map { $0.cell(counts, isEstimated: counts.contains(where: \.isQueueEstimated)) })\
            <td class="number">\(oldest)</td>\(Self.columns.dropFirst().map { $0.cell(counts) })</tr>
            """
    }
}
