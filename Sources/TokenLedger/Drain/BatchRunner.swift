internal import TokenModel

/// Runs batches, each in one transaction, and decides what happens to the rows of a batch that fails.
///
/// The rows of a failed batch move unread to the retry partition and are tried there one by one (`RetryRows.swift`), so that a
/// single row cannot stop the queue.
struct BatchRunner {
    let interpret: @Sendable (SendResult) -> Verdict
    let rejectedAllowance: RejectedAllowance
    let pair: DrainPair
    var transaction: BatchTransaction
    var guardLimits: GuardLimits

    /// Runs a batch, and moves its rows to the retry partition if it fails.
    ///
    /// - Throws: When the connection is lost.
    func run(
        _ pages: Range<Int>, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> PartitionTurn.BatchOutcome {
        do {
            let refusal =
                partition == .retry
                ? try retry(pages, into: &pass, on: &connection, report: report)
                : try recordOrSetAside(pages, of: partition, into: &pass, on: &connection, report: report)
            switch refusal {
            case .erasure, .partition:
                pass.lockWaits += 1
                return .partitionLocked
            case .range, nil: return .finished
            }
        } catch {
            switch error.remedy {
            case .reconnect: throw error
            case .retry: return .rowsLocked
            case .fixData:
                pass.trouble = error
                return .dataRefused
            case .fixSetup:
                pass.trouble = error
                return .setupFailed
            }
        }
    }

    /// - Throws: If the rows can neither be recorded nor left for a retry; they stay where they are.
    private func recordOrSetAside(
        _ pages: Range<Int>, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        do {
            return try record(.pages(pages), of: partition, into: &pass, on: &connection, report: report)
        } catch {
            if error.remedy == .reconnect { throw error }
            if error.remedy == .retry { pass.lockWaits += 1 }
            let refusal = try setAside(pages, of: partition, into: &pass, on: &connection, report: report)
            if refusal == nil, error.remedy == .fixData { report(.batchSetAside(error)) }
            return refusal
        }
    }

    /// Moves the rows to the retry partition without reading them.
    private func setAside(
        _ pages: Range<Int>, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        do {
            return try inTransaction(.pages(pages), of: partition, into: &pass, on: &connection, report: report) {
                connection, _ throws(DatabaseError) in
                try QueueRows.setAside(.pages(pages), of: partition, on: &connection)
            }
        } catch {
            // Another session has locked rows of the queue itself.
            if error.remedy == .retry { pass.lockWaits += 1 }
            throw error
        }
    }

    /// Records the results in these rows.
    ///
    /// - Returns: The lock of another session that kept the batch from beginning, if there was one.
    func record(
        _ rows: RowRange, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        var isAtGuard = false
        // The other drain's turn at the guard begins after the commit.
        defer { if isAtGuard { pair.leaveGuard() } }
        return try inTransaction(rows, of: partition, into: &pass, on: &connection, report: report) {
            connection, pass throws(DatabaseError) in
            let batch = try Batch.take(rows, of: partition, interpret: interpret, on: &connection)
            if batch.taken == 0 { return nil }
            if batch.hasSuspects { isAtGuard = pair.enterGuard() }
            let recorded = try batch.record(from: partition, guardLimits, rejectedAllowance, on: &connection)
            if recorded == nil { pass.lockWaits += 1 }
            return recorded
        }
    }

    /// Takes the locks of a batch, runs `work` and commits, then adds to the pass and reports what `work` has done. Rolls back if `work`
    /// returns nil.
    ///
    /// - Returns: The lock of another session that kept the batch from beginning, if there was one.
    func inTransaction(
        _ rows: RowRange, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report,
        _ work: (inout Connection, inout Drain.Pass) throws(DatabaseError) -> Batch.Recorded?
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        let began = ContinuousClock.now
        do {
            let refusal = try transaction.beginTaking(partition, firstPage: rows.firstPage, on: &connection)
            guard refusal == nil, let recorded = try work(&connection, &pass) else {
                connection.rollback()
                return refusal
            }
            try connection.commit()
            pass.add(recorded.pass)
            report(.committed(recorded.counts, took: began.duration(to: .now)))
            for turn in recorded.turns { report(.guardChanged(turn)) }
            return nil
        } catch {
            connection.rollback()
            rejectedAllowance.forgetCount()
            throw error
        }
    }
}
