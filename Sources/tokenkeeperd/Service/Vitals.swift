internal import FoundationEssentials
internal import TokenLedger

/// How the daemon is, as systemd and people are told: a pure value, made of what the duties have reported.
struct Vitals {
    enum Part: String, CaseIterable, Sendable {
        case drain, sweep
    }

    enum Phase: Equatable {
        case starting, running, reloading
        case stopping
        /// A person must act.
        case failed(String)
    }

    /// What one of the duties does and has promised.
    private struct Report {
        /// By then it is heard of again, or else it hangs.
        var heardOfBy: ContinuousClock.Instant
        /// How long the server has not answered its statement.
        var unansweredFor: Duration = .zero
        /// The database has answered it, and the schema fits.
        var connected = false
        /// What is in its way, since when, and whether it is that PostgreSQL is away.
        var obstacle: (words: String, since: Date, isAway: Bool)?
    }

    private var reports: [Part: Report] = [:]
    var phase = Phase.starting
    var queue: Heartbeat.Queue?
    var isSweeping = false
    /// Migrations are being applied before the start is over.
    var isMigrating = false
    /// The last sweep that has ended: when, and how.
    var lastSweep: (at: Date, outcome: String)?
    /// Why the last reload changed nothing.
    var refusedReload: String?

    /// A duty lives, and will be heard of again.
    mutating func beat(_ part: Part, heardOfBy: ContinuousClock.Instant, unansweredFor: Duration = .zero) {
        reports[part, default: Report(heardOfBy: heardOfBy)].heardOfBy = heardOfBy
        reports[part]?.unansweredFor = unansweredFor
    }

    mutating func connected(_ part: Part) { reports[part]?.connected = true }

    /// A duty has returned: nothing is expected of it any more.
    mutating func left(_ part: Part) { reports[part] = nil }

    /// - Parameter words: Nil when nothing is in its way any more.
    /// - Parameter isAway: Whether it is that PostgreSQL is away, and nothing is known of the queue.
    mutating func obstacle(_ words: String?, isAway: Bool = false, of part: Part, at now: Date) {
        let since = reports[part]?.obstacle?.since ?? now
        reports[part]?.obstacle = words.map { ($0, since, isAway) }
    }

    /// What is in the way of the drain, or else of the sweep: mostly it is one and the same.
    private var obstacle: (words: String, since: Date, isAway: Bool)? {
        Part.allCases.compactMap { reports[$0]?.obstacle }.first
    }

    /// Whether the process may call itself ready: the database has answered all of it, and the schema fits.
    var isComplete: Bool { Part.allCases.allSatisfy { reports[$0]?.connected == true } }

    /// Whether every duty has kept its promise. One that waits for PostgreSQL, and says so, lives.
    func isAlive(at now: ContinuousClock.Instant) -> Bool {
        reports.values.allSatisfy { now <= $0.heardOfBy }
    }

    /// An answer that takes longer than this is worth a word.
    private static let longAnswer: Duration = .seconds(5)

    /// One line for `systemctl status`.
    var status: String {
        switch phase {
        case .failed(let message): return message
        case .stopping: return "stopping: the batches in hand are finished"
        case .reloading: return "reloading the configuration"
        case .starting where obstacle == nil: return "starting: connecting to PostgreSQL"
        case .starting, .running: break
        }
        var parts: [String] = []
        if let obstacle { parts.append("\(obstacle.words) (since \(Self.text(obstacle.since)))") }
        if let queue, obstacle?.isAway != true {
            parts.append(
                queue.depth == 0
                    ? "the queue is empty" : "\(queue.exact ? "" : "about ")\(queue.depth) results are queued")
        }
        for part in Part.allCases {
            if let silent = reports[part]?.unansweredFor, silent > Self.longAnswer {
                parts.append("waiting for PostgreSQL to answer the \(part.rawValue) for \(silent.components.seconds) s")
            }
        }
        if isSweeping {
            parts.append("sweeping")
        } else if let lastSweep {
            parts.append("last sweep \(lastSweep.outcome) \(Self.text(lastSweep.at))")
        }
        if let refusedReload { parts.append("reload refused: \(refusedReload)") }
        return parts.isEmpty ? "running" : parts.joined(separator: "; ")
    }

    static func text(_ date: Date) -> String {
        let format = Date.ISO8601FormatStyle(dateTimeSeparator: .space, timeZone: .gmt)
        return date.formatted(format.year().month().day().time(includingFractionalSeconds: false)) + " UTC"
    }
}
