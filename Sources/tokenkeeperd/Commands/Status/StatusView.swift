internal import TokenLedger
internal import TokenModel

/// What `status --watch` shows: the latest status, and why there is no newer one. Pure.
struct StatusView {
    private var lines: [String] = []
    /// The running campaigns.
    private var campaigns: [CampaignProgress] = []
    /// The database and its server; nil before the first connection.
    var database: String?
    /// When the lines were read; nil before the first.
    private var readAt: String?
    private var problem: (words: String, since: String)?

    mutating func show(_ report: StatusReport, _ campaigns: [CampaignProgress] = [], at time: String) {
        self.campaigns = campaigns
        lines = (report.warnings.isEmpty ? ["no warnings"] : []) + StatusText.lines(report)
        readAt = time
        problem = nil
    }

    /// - Parameter words: What the database, or the way to it, says.
    mutating func fail(_ words: String, at time: String) {
        problem = (HistoryText.plain(words), problem?.since ?? time)
    }

    /// The lines for a screen, each no longer than the width.
    func frame(width: Int, height: Int, at time: String) -> [String] {
        var all = ["tokenkeeperd status, \(time); q quits"] + [database].compactMap(\.self) + [""]
        if let problem {
            all.append("NO STATUS since \(problem.since): \(problem.words); trying again")
            if let readAt { all += ["Before, at \(readAt):", ""] }
        }
        all = all.flatMap { Self.wrapped($0, width: width) }
        if !campaigns.isEmpty { all += campaigns.map { CampaignText.progress($0, width: width) } + [""] }
        all += lines.flatMap { Self.wrapped($0, width: width) }
        if all.count <= height { return all }
        let hidden = counted(all.count - height + 1, "more line", "more lines")
        return all.prefix(max(height - 1, 0)) + ["… \(hidden): make the window higher".prefix(width).description]
    }

    /// Breaks a line at blanks, and in the middle of a word that is longer than the width. Further lines are indented.
    static func wrapped(_ line: String, width: Int) -> [String] {
        let width = max(width, 1)
        let indent = String(repeating: " ", count: width > 20 ? 4 : 0)
        var (rest, lines) = (line[...], [String]())
        while true {
            let start = lines.isEmpty ? "" : indent
            let room = width - start.count
            if rest.count <= room { return lines + [start + rest] }
            let head = rest.prefix(room + 1)
            let blank = head.dropFirst().lastIndex(of: " ")
            let end = blank ?? rest.index(rest.startIndex, offsetBy: room)
            lines.append(start + rest[..<end])
            rest = rest[end...].drop { $0 == " " }
        }
    }
}
