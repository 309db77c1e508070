internal import TokenModel

/// A sweep: deletes what is older than its retention.
///
/// Start here: `clearAway` is the order of the steps. `SweepLease` decides who may sweep, `SweepStep.swift` is one transaction.
///
/// Every batch is a short transaction of its own. A batch that is interrupted is rolled back; the batches before it stay, and the
/// next sweep continues from there. A failure in one topic or table is reported at the end and does not stop the others.
public struct Sweep {
    let lease: SweepLease
    let plan: SweepPlan
    let transaction: BatchTransaction

    public init(_ lease: SweepLease, _ plan: SweepPlan, lockTimeout: Duration) {
        self.lease = lease
        self.plan = plan
        self.transaction = BatchTransaction(lockTimeout: lockTimeout)
    }

    /// Why a sweep ended early.
    enum Ended: Error {
        case stopped
        case leaseLost
    }

    /// The steps of a sweep, in order. A dry run only counts.
    private func clearAway(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        try pruneTokens(into: &findings, on: &connection, while: goesOn)
        try deleteOldRows(into: &findings, on: &connection, while: goesOn)
        if lease.dryRun { return }
        try tidyHistory(into: &findings, on: &connection, while: goesOn)
        try tidyCounts(into: &findings, on: &connection, while: goesOn)
        try reapTopics(into: &findings, on: &connection, while: goesOn)
    }

    /// Sweeps to the end, and records the outcome in `sweep_run`.
    ///
    /// - Parameter goesOn: Asked before each batch.
    /// - Throws: Only if the outcome could not be recorded, because the connection is lost. The run then shows as interrupted once
    ///   its heartbeat is old.
    public func perform(on connection: inout Connection, while goesOn: () -> Bool) throws(DatabaseError) -> SweepReport
    {
        var findings = SweepFindings()
        do {
            try clearAway(into: &findings, on: &connection, while: goesOn)
            if !findings.failures.isEmpty {
                let held = findings.hasMetLock ? try lockedTables(on: &connection) : nil
                return try finish(
                    .failed, [findings.message, held].compactMap(\.self).joined(separator: "; "), on: &connection)
            }
            let messages = [findings.message, try leftOver(on: &connection)].compactMap(\.self)
            return try finish(
                .finished, messages.isEmpty ? nil : messages.joined(separator: "; "), on: &connection)
        } catch Ended.stopped {
            return try finish(
                .interrupted,
                "it was stopped; "
                    + (lease.forced ? "request another forced sweep" : "the next sweep continues from there"),
                on: &connection)
        } catch Ended.leaseLost {
            return try finish(.interrupted, nil, on: &connection)
        } catch let error as DatabaseError {
            if error.remedy == .reconnect { throw error }
            return try finish(.failed, error.description, on: &connection)
        } catch {
            return try finish(.failed, "\(error)", on: &connection)
        }
    }

    /// Who holds locks on whole tables, in words; nil for nobody. A holder is visible only while it holds the lock.
    private func lockedTables(on connection: inout Connection) throws(DatabaseError) -> String? {
        let holders = try LockHolder.all(on: &connection).filter(\.isOfWholeTable)
        return holders.isEmpty ? nil : holders.words
    }

    /// Tokens that were due and not refused, but are still there, in words.
    private func leftOver(on connection: inout Connection) throws(DatabaseError) -> String? {
        if lease.dryRun { return nil }
        let left = try connection.query(
            """
            SELECT coalesce(sum(tokens - pruned), 0)::bigint FROM tokenkeeper.sweep_topic
            WHERE run_id = $1 AND NOT refused AND tokens > pruned
            """, [.int8(lease.runID)]
        ).value(Int64.self)
        return left > 0
            ? counted(left, "due token is", "due tokens are") + " left for the next sweep: an application has locked "
                + (left == 1 ? "it, or registered it again" : "them, or registered them again") : nil
    }

    /// Records the outcome, unless another daemon has taken the run over, and reads the run back.
    private func finish(
        _ outcome: SweepReport.Outcome, _ message: String?, on connection: inout Connection
    ) throws(DatabaseError) -> SweepReport {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_run SET outcome = $2, message = $3, finished_at = clock_timestamp()
                WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $4
                """, [.int8(lease.runID), .text(outcome.rawValue), .text(message), .text(lease.holder)])
        }
        guard let report = try SweepReport.ended(lease.runID, on: &connection) else {
            throw DatabaseError(.unexpectedRow, "sweep \(lease.runID) has been deleted, or is still running")
        }
        return report
    }
}
