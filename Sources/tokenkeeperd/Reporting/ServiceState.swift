internal import FoundationEssentials
internal import TokenLedger
internal import TokenModel

/// The daemon's state, as systemd and people see it: a pure value, made from the reports of the workers.
struct ServiceState {
    enum Part: String, CaseIterable, Sendable {
        case drain, sweep
        /// Present only if credentials are configured.
        case send
        /// Present only while an audience takes long to find.
        case addressing
        /// Present only during a backlog.
        case backlog
        /// Present only if `metrics.listen` is set.
        case monitor
    }

    enum Phase: Equatable {
        case starting, running, reloading, stopping
        /// The last status.
        case ended(String)
    }

    /// The last report of a worker.
    private struct Report {
        /// A worker that has not reported again by then hangs.
        var heardOfBy: SuspendingClock.Instant
        /// How long the server has not responded to the worker's statement.
        var unansweredFor: Duration = .zero
        /// The database has responded, and the schema fits.
        var connected = false
        /// What blocks the worker, since when, why PostgreSQL is away if it is, and whether the worker still looks at the queue.
        var obstacle: (words: String, since: Date, away: Away?, knowsQueue: Bool)?
    }

    private var reports: [Part: Report] = [:]
    var phase = Phase.starting
    /// The queue of results, as the drain last saw it; nil if it never did.
    var queue: Heartbeat.Queue?
    /// Why results wait, in words; nil if none waits.
    var waitReason: String?
    /// The queue of registrations; nil as above.
    var registrations: Heartbeat.QueueReport?
    /// What else the view `status` said then.
    var summary = StatusSummary()
    /// What keeps requests waiting, one sentence each, as the sender of this process sees it.
    var sendingProblems: [String] = []
    /// What a worker cannot do, while it does the rest.
    var failures: [Part: [Chores.Failure]] = [:]
    /// When the drain last saw the queues; nil if it never did.
    var sawQueueAt: Date?
    var isSweeping = false
    /// Migrations are being applied during the start.
    var isMigrating = false
    /// When and how the last sweep ended.
    var lastSweep: (at: Date, outcome: String)?
    /// Why the last reload changed nothing.
    var refusedReload: String?

    /// A worker is alive, and will report again by this time.
    mutating func beat(_ part: Part, heardOfBy: SuspendingClock.Instant, unansweredFor: Duration = .zero) {
        reports[part, default: Report(heardOfBy: heardOfBy)].heardOfBy = heardOfBy
        reports[part]?.unansweredFor = unansweredFor
    }

    /// A worker begins to connect. An obstacle that is already reported stays.
    mutating func connecting(_ part: Part, at now: Date) {
        reports[part]?.connected = false
        if reports[part]?.obstacle == nil {
            obstacle("connecting to PostgreSQL", away: .connect, of: part, at: now)
        }
    }

    /// PostgreSQL has responded to a worker, and the schema fits.
    mutating func connected(_ part: Part) {
        reports[part]?.connected = true
        if reports[part]?.obstacle?.away?.isUnreachable == true { reports[part]?.obstacle = nil }
    }

    /// A worker has returned: no more reports are expected.
    mutating func left(_ part: Part) {
        reports[part] = nil
        failures[part] = nil
    }

    /// - Parameters:
    ///   - words: What blocks the worker; nil if nothing does any more.
    ///   - away: Why the worker cannot work with PostgreSQL, if it cannot.
    ///   - knowsQueue: Whether the worker still looks at the queue.
    mutating func obstacle(
        _ words: String?, away: Away? = nil, knowsQueue: Bool = false, of part: Part, at now: Date
    ) {
        let since = reports[part]?.obstacle?.since ?? now
        reports[part]?.obstacle = words.map { ($0, since, away, knowsQueue) }
    }

    /// What blocks the drain or, if nothing does, another worker. Usually the same thing blocks all of them.
    private var obstacle: (words: String, since: Date)? {
        if let all = reports[.drain]?.obstacle { return (all.words, all.since) }
        for (part, name) in [(Part.sweep, "sweep"), (.send, "sending")] {
            if let obstacle = reports[part]?.obstacle { return ("\(obstacle.words), says the \(name)", obstacle.since) }
        }
        return nil
    }

    /// What blocks a worker, and since when, in words; nil if nothing does.
    var obstacleText: String? { obstacle.map { "\($0.words) (since \(Self.text($0.since)))" } }

    /// Whether the process is ready: the database has responded to every worker that always runs, and the schema fits.
    var isComplete: Bool { [.drain, .sweep].allSatisfy { reports[$0]?.connected == true } }

    /// What the workers cannot do, in words: a person must act. A lock of another session ends by itself.
    var failingChores: [String] {
        Part.allCases.flatMap { failures[$0] ?? [] }.filter { $0.error.remedy != .retry }.map(\.words)
    }

    /// What `/ready` says: whether all workers work, and do all that they should.
    var isReady: Bool { isComplete && failingChores.isEmpty && !isSilent }
    var readyStatus: String { ([status] + failingChores).joined(separator: "\n") }

    /// Whether PostgreSQL has not responded to the drain for so long that the daemon counts as not ready.
    private var isSilent: Bool { (reports[.drain]?.unansweredFor ?? .zero) >= .seconds(10) }

    /// Why the drain cannot work with PostgreSQL; nil if it can.
    var away: Away? {
        if let away = reports[.drain]?.obstacle?.away { return away }
        return reports[.drain]?.connected != true || isSilent ? .connect : nil
    }

    /// Whether every worker has reported in time. A worker that waits for PostgreSQL reports, and is alive.
    func isAlive(at now: SuspendingClock.Instant) -> Bool {
        reports.values.allSatisfy { now <= $0.heardOfBy }
    }

    /// A response that takes longer than this is reported.
    private static let longAnswer: Duration = .seconds(5)

    /// How long a worker has been waiting for a response, if that is to be reported.
    private func unanswered(_ part: Part) -> Duration? {
        reports[part].map(\.unansweredFor).flatMap { $0 > Self.longAnswer ? $0 : nil }
    }

    /// Which workers have been waiting too long for a response, in words.
    private func unansweredTexts(_ parts: [Part] = Part.allCases) -> [String] {
        parts.compactMap { part in
            unanswered(part).map {
                "waiting for PostgreSQL to answer the \(part.rawValue) for \($0.components.seconds) s"
            }
        }
    }

    /// What keeps the workers from their work, in words; empty if nothing does. A statement of the sweep may take long, so that it says
    /// nothing about PostgreSQL.
    var obstacles: [String] { [obstacleText].compactMap { $0 } + unansweredTexts([.drain, .send]) }

    /// The shutdown begins.
    ///
    /// - Parameter failure: What a person must fix, if that is the reason.
    mutating func stopping(failure: String?) {
        // If the daemon was never ready, its last status says what it waited for.
        let waited = phase == .starting ? obstacle.map { "never was ready; \($0.words)" } : nil
        phase = (failure ?? waited).map { .ended($0) } ?? .stopping
    }

    /// - Parameter inTime: False if a batch was interrupted.
    mutating func stopped(inTime: Bool) {
        if phase == .stopping {
            phase = .ended(inTime ? "stopped" : "stopped; a batch was interrupted, and runs again after the next start")
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
        if let obstacleText { parts.append(obstacleText) }
        // The state of the queue is unknown while no worker looks at it.
        if let queue, reports[.drain]?.obstacle?.knowsQueue ?? true, unanswered(.drain) == nil {
            if let attention { parts.append(attention) }
            parts.append(text(queue))
            if let queuedRegistrations { parts.append(queuedRegistrations) }
            if summary.requests > 0 { parts.append(requests) }
        }
        parts += unansweredTexts()
        if isSweeping {
            parts.append("sweeping")
        } else if let lastSweep {
            parts.append("last sweep \(lastSweep.outcome) \(Self.text(lastSweep.at))")
        }
        if let refusedReload { parts.append("reload refused: \(refusedReload)") }
        return parts.isEmpty ? "has not looked at the queue yet" : parts.joined(separator: "; ")
    }

    /// The view's warnings and the sender's problems. What is in the way of a worker is said before; then their number is enough.
    private var attention: String? {
        let all = sendingProblems + summary.warnings.filter { !sendingProblems.contains($0) }
        guard let first = all.first else { return nil }
        let look = counted(all.count, "warning", "warnings") + ", see `tokenkeeperd status`"
        if obstacle != nil { return look }
        return (first.count > 250 ? first.prefix(249) + "…" : first) + (all.count == 1 ? "" : "; " + look)
    }

    /// "The queue is empty" means that all is well.
    private func text(_ queue: Heartbeat.Queue) -> String {
        guard queue.depth > 0 else {
            if !queue.exact { return "the length of the queue is not known" }
            return obstacle == nil && attention == nil && summary.requests == 0 && queuedRegistrations == nil
                ? "the queue is empty" : "0 results are queued"
        }
        return text(queue, "result is", "results are", waitReason)
    }

    /// Nil if none is queued.
    private var queuedRegistrations: String? {
        guard let registrations, registrations.queue.depth > 0 else { return nil }
        return text(registrations.queue, "registration is", "registrations are", registrations.reason)
    }

    private func text(_ queue: Heartbeat.Queue, _ one: String, _ many: String, _ reason: String?) -> String {
        let since = queue.oldest.map { ", the oldest since \(Self.text($0.date))" } ?? ""
        // An obstacle says the same.
        let because = reports[.drain]?.obstacle == nil ? reason.map { ", because \($0)" } ?? "" : ""
        return (queue.exact ? "" : "about ") + counted(queue.depth, one, many) + " queued" + since + because
    }

    private var requests: String {
        let number =
            summary.hasMoreRequests
            ? "\(summary.requests) or more requests are" : counted(summary.requests, "request is", "requests are")
        return number + " queued" + (summary.oldestDue.map { ", the oldest due since \(Self.text($0.date))" } ?? "")
    }

    static func text(_ date: Date) -> String {
        let format = Date.ISO8601FormatStyle(dateTimeSeparator: .space, timeZone: .gmt)
        return date.formatted(format.year().month().day().time(includingFractionalSeconds: false)) + " UTC"
    }
}

extension Instant {
    var date: Date { Date(timeIntervalSince1970: Double(microseconds) / 1_000_000) }
}
