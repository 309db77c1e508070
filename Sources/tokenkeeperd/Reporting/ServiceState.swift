internal import FoundationEssentials
internal import TokenLedger
internal import TokenModel

/// How the daemon is, as systemd and people are told: a pure value, made of what the workers have reported.
struct ServiceState {
    enum Part: String, CaseIterable, Sendable {
        case drain, sweep
        /// Only where credentials are configured.
        case send
        /// Comes and goes with a backlog.
        case secondDrain = "second drain"
    }

    enum Phase: Equatable {
        case starting, running, reloading, stopping
        /// The last word.
        case ended(String)
    }

    /// What one of the workers does and has promised.
    private struct Report {
        /// By then it is heard of again, or else it hangs.
        var heardOfBy: SuspendingClock.Instant
        /// How long the server has not answered its statement.
        var unansweredFor: Duration = .zero
        /// The database has answered it, and the schema fits.
        var connected = false
        /// What is in its way, since when, whether it is that PostgreSQL is away, and whether it looks at the queue all the same.
        var obstacle: (words: String, since: Date, isAway: Bool, knowsQueue: Bool)?
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

    /// A worker lives, and will be heard of again.
    mutating func beat(_ part: Part, heardOfBy: SuspendingClock.Instant, unansweredFor: Duration = .zero) {
        reports[part, default: Report(heardOfBy: heardOfBy)].heardOfBy = heardOfBy
        reports[part]?.unansweredFor = unansweredFor
    }

    /// A worker begins to connect; what is in its way already stays told.
    mutating func connecting(_ part: Part, at now: Date) {
        reports[part]?.connected = false
        if reports[part]?.obstacle == nil {
            obstacle("connecting to PostgreSQL", isAway: true, of: part, at: now)
        }
    }

    /// PostgreSQL has answered a worker, and the schema fits.
    mutating func connected(_ part: Part) {
        reports[part]?.connected = true
        if reports[part]?.obstacle?.isAway == true { reports[part]?.obstacle = nil }
    }

    /// A worker has returned: nothing is expected of it any more.
    mutating func left(_ part: Part) { reports[part] = nil }

    /// - Parameters:
    ///   - words: Nil when nothing is in its way any more.
    ///   - isAway: Whether it is that PostgreSQL is away, and nothing is known of the queue.
    ///   - knowsQueue: Whether the worker goes on looking at the queue.
    mutating func obstacle(
        _ words: String?, isAway: Bool = false, knowsQueue: Bool = false, of part: Part, at now: Date
    ) {
        let since = reports[part]?.obstacle?.since ?? now
        reports[part]?.obstacle = words.map { ($0, since, isAway, knowsQueue) }
    }

    /// What is in the way of the drain, or else of another worker alone: mostly it is one and the same.
    private var obstacle: (words: String, since: Date)? {
        if let all = reports[.drain]?.obstacle { return (all.words, all.since) }
        for (part, name) in [(Part.sweep, "sweep"), (.send, "sending")] {
            if let obstacle = reports[part]?.obstacle { return ("\(obstacle.words), says the \(name)", obstacle.since) }
        }
        return nil
    }

    /// Whether the process may call itself ready: the database has answered all of it, and the schema fits.
    var isComplete: Bool { [.drain, .sweep].allSatisfy { reports[$0]?.connected == true } }

    /// Whether every worker has kept its promise. One that waits for PostgreSQL, and says so, lives.
    func isAlive(at now: SuspendingClock.Instant) -> Bool {
        reports.values.allSatisfy { now <= $0.heardOfBy }
    }

    /// An answer that takes longer than this is worth a word.
    private static let longAnswer: Duration = .seconds(5)

    /// How long a worker has been waiting for an answer, if that is worth a word.
    private func unanswered(_ part: Part) -> Duration? {
        reports[part].map(\.unansweredFor).flatMap { $0 > Self.longAnswer ? $0 : nil }
    }

    /// The end begins.
    ///
    /// - Parameter failure: What a person must mend, when that is why.
    mutating func stopping(failure: String?) {
        // One that never was ready leaves behind what it has waited for.
        let waited = phase == .starting ? obstacle.map { "never was ready; \($0.words)" } : nil
        phase = (failure ?? waited).map { .ended($0) } ?? .stopping
    }

    /// - Parameter inTime: False when a batch was cut off.
    mutating func stopped(inTime: Bool) {
        if phase == .stopping {
            phase = .ended(inTime ? "stopped" : "stopped; a batch was cut off, and the next start takes it up again")
        }
    }

    /// One line for `systemctl status`, of at most 600 bytes.
    var status: String {
        var line = String.UnicodeScalarView()
        var bytes = 0
        for scalar in history.unicodeScalars {
            // A line break would begin another assignment.
            let scalar = scalar.properties.generalCategory == .control ? " " : scalar
            bytes += String(scalar).utf8.count
            if bytes > 597 { return String(line) + "…" }
            line.append(scalar)
        }
        return String(line)
    }

    private var history: String {
        switch phase {
        case .ended(let message): return message
        case .stopping: return "stopping"
        case .reloading: return "reloading the configuration"
        case .starting where isMigrating: return "applying migrations"
        case .starting where obstacle == nil: return "starting"
        case .starting, .running: break
        }
        var parts: [String] = []
        if let obstacle { parts.append("\(obstacle.words) (since \(Self.text(obstacle.since)))") }
        // What is not looked at is not known.
        if let queue, reports[.drain]?.obstacle?.knowsQueue ?? true, unanswered(.drain) == nil {
            parts.append(
                queue.depth == 0
                    ? "the queue is empty" : "\(queue.exact ? "" : "about ")\(queue.depth) results are queued")
        }
        for part in Part.allCases {
            if let silent = unanswered(part) {
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

extension Instant {
    var date: Date { Date(timeIntervalSince1970: Double(microseconds) / 1_000_000) }
}
