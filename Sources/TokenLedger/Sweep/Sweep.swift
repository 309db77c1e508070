internal import TokenModel

/// A sweep under way: clears away, in bounded batches, each a short transaction of its own.
///
/// A batch that is interrupted is rolled back; what the batches before it did stays, and the next sweep goes on from there. What
/// fails for one topic or table is reported at the end, and does not stop the others.
public struct Sweep {
    let lease: SweepLease
    let plan: SweepPlan
    let transaction: BatchTransaction

    public init(_ lease: SweepLease, _ plan: SweepPlan, lockTimeout: Duration) {
        self.lease = lease
        self.plan = plan
        self.transaction = BatchTransaction(lockTimeout: lockTimeout)
    }

    /// Why a sweep did not come to its end by itself.
    enum Ended: Error {
        case stopped
        case leaseLost
    }

    /// What a sweep has to say at its end.
    struct Findings {
        /// Topics that are over their limit, in words.
        var refusals: [String] = []
        /// What failed, in words.
        private(set) var failures: [String] = []
        private var moreFailures = 0

        /// So many failures are told one by one.
        private static let mostTold = 10

        mutating func failed(_ what: String, _ error: DatabaseError) {
            if failures.count < Self.mostTold { failures.append("\(what): \(error)") } else { moreFailures += 1 }
        }

        var message: String? {
            var messages = failures + (moreFailures > 0 ? ["\(moreFailures) more failed"] : [])
            if !refusals.isEmpty { messages.append("refused: " + refusals.joined(separator: "; ")) }
            return messages.isEmpty ? nil : messages.joined(separator: "; ")
        }
    }

    /// Sweeps to the end, and says in `sweep_run` how it went.
    ///
    /// - Parameter goesOn: Asked before each batch.
    /// - Throws: Only when the outcome could not be written down, because the connection is lost; then the run shows as
    ///   interrupted once its heartbeat is old.
    public func perform(on connection: inout Connection, while goesOn: () -> Bool) throws(DatabaseError) -> SweepReport
    {
        var findings = Findings()
        let outcome: SweepReport.Outcome
        let message: String?
        do {
            try clearAway(into: &findings, on: &connection, while: goesOn)
            // What a failure has left is told by the failure.
            let left = findings.failures.isEmpty ? try leftOver(on: &connection) : nil
            let messages = [findings.message, left].compactMap(\.self)
            (outcome, message) = (
                findings.failures.isEmpty ? .finished : .failed,
                messages.isEmpty ? nil : messages.joined(separator: "; ")
            )
        } catch Ended.stopped {
            (outcome, message) = (
                .interrupted,
                lease.forced
                    ? "it was stopped; ask for another one, with force"
                    : "it was stopped; the next sweep goes on from there"
            )
        } catch Ended.leaseLost {
            (outcome, message) = (.interrupted, nil)
        } catch let error as DatabaseError {
            if error.remedy == .reconnect { throw error }
            (outcome, message) = (.failed, error.description)
        } catch {
            (outcome, message) = (.failed, "\(error)")
        }
        return try finish(outcome, message, on: &connection)
    }

    private func clearAway(
        into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        try pruneTokens(into: &findings, on: &connection, while: goesOn)
        try clearAwayResults(into: &findings, on: &connection, while: goesOn)
        if lease.dryRun { return }
        try tidyHistory(into: &findings, on: &connection, while: goesOn)
        try tidyCounts(into: &findings, on: &connection, while: goesOn)
        try reapTopics(into: &findings, on: &connection, while: goesOn)
    }

    /// Does something that may fail without stopping the rest. A lost connection, a lost lease and a request to stop do stop it.
    ///
    /// - Returns: What the work returns; nil if it failed, which is then among the findings.
    @discardableResult
    func attempt<Value>(_ what: String, into findings: inout Findings, _ work: () throws -> Value) throws -> Value? {
        do {
            return try work()
        } catch let error as DatabaseError where error.remedy != .reconnect {
            findings.failed(what, error)
            return nil
        }
    }

    /// What was due, not refused, and is there still, in words.
    private func leftOver(on connection: inout Connection) throws(DatabaseError) -> String? {
        if lease.dryRun { return nil }
        let left =
            try connection.query(
                "SELECT sum(tokens - pruned)::bigint FROM tokenkeeper.sweep_topic WHERE run_id = $1 AND NOT refused AND tokens > pruned",
                [.int8(lease.runID)]
            ).integer(0, 0) ?? 0
        return left > 0
            ? "\(left) tokens that were due are left to the next sweep: an application holds them locked, or they came back"
            : nil
    }

    private func finish(
        _ outcome: SweepReport.Outcome, _ message: String?, on connection: inout Connection
    ) throws(DatabaseError) -> SweepReport {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_run SET outcome = $2, message = $3, finished_at = clock_timestamp()
                WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $4
                """, [.int8(lease.runID), .text(outcome.rawValue), .text(message), .text(lease.holder)])
        }
        let row = try connection.query(
            """
            SELECT outcome, message, pruned_suppressed, pruned_dormant, deleted_events, deleted_rejected, deleted_held,
                   deleted_runs, refused, deleted_sends
            FROM tokenkeeper.sweep_run WHERE run_id = $1
            """, [.int8(lease.runID)])
        return SweepReport(
            runID: lease.runID, trigger: lease.trigger, dryRun: lease.dryRun, forced: lease.forced,
            outcome: row.text(0, 0).flatMap(SweepReport.Outcome.init(rawValue:)) ?? outcome,
            prunedSuppressed: row.integer(0, 2) ?? 0, prunedDormant: row.integer(0, 3) ?? 0,
            deletedEvents: row.integer(0, 4) ?? 0, deletedRejected: row.integer(0, 5) ?? 0,
            deletedHeld: row.integer(0, 6) ?? 0, deletedRuns: row.integer(0, 7) ?? 0,
            deletedSends: row.integer(0, 9) ?? 0, refused: row.integer(0, 8) ?? 0,
            message: row.text(0, 1), topics: try SweepReport.Topic.all(of: lease.runID, on: &connection))
    }
}
