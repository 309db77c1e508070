internal import FoundationEssentials
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// What this process counts for its metrics, since its start. It answers while PostgreSQL is away: it never asks anybody.
final class ProcessMetrics: Sendable {
    private struct Counts {
        var results = Drain.Pass()
        /// Errors of PostgreSQL, by the class of their SQLSTATE.
        var errors: [String: Int] = [:]
    }

    private let counts = Mutex(Counts())
    private let startedAt = Date.now
    /// Nil if nobody asks for metrics.
    private let results: ResultCounter?
    private let batches = DurationHistogram()
    /// How long the statements of all workers take.
    let statements = DurationHistogram()
    let database = DatabaseMetrics()
    let sending = SendMetrics()

    /// - Parameter topicLabels: Nil if nobody asks for metrics.
    init(topicLabels: TopicLabels?) {
        results = topicLabels.map(ResultCounter.init)
    }

    /// Takes what a batch has counted, once it is committed.
    ///
    /// - Parameter duration: From its BEGIN to its COMMIT.
    func add(_ counted: [ResultCount], took duration: Duration) {
        results?.add(counted)
        batches.record(duration)
    }

    /// Takes what the drain has done.
    func add(_ pass: Drain.Pass) {
        counts.withLock { $0.results.add(pass) }
    }

    /// Takes an error of PostgreSQL. A lost connection has no SQLSTATE.
    func add(_ error: DatabaseError) {
        let name = error.sqlState.map { String($0.prefix(2)) } ?? "none"
        counts.withLock { $0.errors[name, default: 0] += 1 }
    }

    /// A queue that was seen longer ago is not reported: three heartbeats are missing.
    private static let trustsQueueFor = 15.0

    /// The page for a scrape.
    ///
    /// - Parameters:
    ///   - state: The state of the daemon at this moment.
    ///   - sweepInterval: Nil if the timer is off.
    func text(_ state: ServiceState, sweepInterval: Duration?, at now: Date = .now) -> String {
        let counts = counts.withLock { $0 }
        var text = MetricsText()
        addProcess(state, to: &text)
        text.add(
            "database_up", .gauge, "Whether the drain can work with PostgreSQL.", state.away == nil ? 1 : 0)
        text.add(
            "database_away", .gauge, "Why the drain cannot work with PostgreSQL: 1 for the reason.",
            Away.allCases.map { ([("reason", $0.rawValue)], $0 == state.away ? 1 : 0) })
        text.add(
            "database_last_answer_timestamp_seconds", .gauge,
            "When PostgreSQL last told the drain the state of the queue.",
            state.sawQueueAt?.timeIntervalSince1970)
        text.add(
            "database_errors_total", .counter,
            "Errors of PostgreSQL, by the class of their SQLSTATE; none if the connection was lost.",
            counts.errors.sorted { $0.key < $1.key }.map { ([("sqlstate_class", $0.key)], Double($0.value)) })
        text.add(
            "database_statement_duration_seconds",
            "How long round trips to PostgreSQL took, from sending a statement to its last result.",
            [([], statements.counts)])
        add(counts.results, to: &text)
        if let sawQueueAt = state.sawQueueAt, now.timeIntervalSince(sawQueueAt) < Self.trustsQueueFor {
            add(state.queue, to: &text)
            addRegistrations(state.registrations?.queue, to: &text)
        }
        text.add(
            "sweep_interval_seconds", .gauge, "The time between two sweeps, sweep.interval. Absent if it is off.",
            sweepInterval.map { $0 / .seconds(1) })
        text.add(
            "sweep_last_end_timestamp_seconds", .gauge, "When the last sweep ended, by its outcome.",
            state.lastSweep.map { [([("outcome", $0.outcome)], $0.at.timeIntervalSince1970)] } ?? [])
        database.add(to: &text)
        sending.add(to: &text)
        return text.text
    }

    private func addProcess(_ state: ServiceState, to text: inout MetricsText) {
        text.add(
            "build_info", .gauge, "Always 1. The label is the version of this daemon.",
            [([("version", "\(Daemon.version)")], 1)])
        text.add(
            "config_last_reload_successful", .gauge, "Whether the last reload of the configuration was accepted.",
            state.refusedReload == nil ? 1 : 0)
        ProcessFigures.add(to: &text, startedAt: startedAt)
    }

    private func add(_ results: Drain.Pass, to text: inout MetricsText) {
        text.add(
            "results_total", .counter, "Results taken off the queue and counted, by what APNs said.",
            rendered: self.results?.samples ?? [])
        text.add(
            "results_rejected_total", .counter, "Results that could not be understood; they are in rejected_result.",
            Double(results.rejected))
        text.add(
            "results_held_total", .counter, "Results that the mass-failure guard holds; they are in held_result.",
            Double(results.held))
        text.add(
            "results_retried_total", .counter, "Results that were set aside to be retried.", Double(results.putBack))
        text.add(
            "drain_batch_duration_seconds",
            "How long the transactions took that take results or registrations off their queue, from BEGIN to COMMIT.",
            [([], batches.counts)])
        let registrations = results.registrations
        text.add(
            "registrations_total", .counter,
            "Registrations and logouts taken off their queue. Applied; rejected, because it could not be understood; held, by the "
                + "mass-failure guard; or retried, because it was set aside for another attempt.",
            [
                ("applied", registrations.applied), ("rejected", registrations.rejected), ("held", registrations.held),
                ("retried", registrations.putBack),
            ].map { ([("outcome", $0.0)], Double($0.1)) })
    }

    private func addRegistrations(_ queue: Heartbeat.Queue?, to text: inout MetricsText) {
        text.add(
            "database_queue_registrations", .gauge,
            "Registrations that wait in their queue. A queue of more than 20,000 is estimated.",
            queue.map { Double($0.depth) })
        text.add(
            "database_queue_oldest_registration_timestamp_seconds", .gauge,
            "When the oldest registration in the queue was queued.",
            queue?.oldest.map { Double($0.microseconds) / 1e6 })
    }

    private func add(_ queue: Heartbeat.Queue?, to text: inout MetricsText) {
        text.add(
            "database_queue_results", .gauge,
            "Results that wait in the queue. A queue of more than 20,000 is estimated.",
            queue.map { Double($0.depth) })
        text.add(
            "database_queue_oldest_timestamp_seconds", .gauge, "When the oldest result in the queue was queued.",
            queue?.oldest.map { Double($0.microseconds) / 1e6 })
    }
}
