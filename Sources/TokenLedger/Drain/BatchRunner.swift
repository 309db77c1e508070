/// Runs batches of a queue, each in one transaction, and decides what happens to the rows of a batch that fails.
///
/// The rows of a failed batch move unread to the retry partition and are tried there one by one (`RetryRows.swift`), so that a
/// single row cannot stop the queue.
struct BatchRunner {
    let queue: any Queue
    let rejectedAllowance: RejectedAllowance
    let pair: DrainPair
    var transaction: BatchTransaction
    var guardLimits: GuardLimits
    let refused = RefusedRows()

    /// Runs a batch, and moves its rows to the retry partition if it fails.
    ///
    /// - Throws: When the connection is lost.
    func run(
        _ pages: Range<Int>, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> PartitionTurn.BatchOutcome {
        let takenBefore = pass.taken
        do {
            let refusal =
                partition.isRetry
                ? try retry(pages, into: &pass, on: &connection, report: report)
                : try recordOrSetAside(pages, of: partition, into: &pass, on: &connection, report: report)
            switch refusal {
            case .drain, .partition:
                pass.lockWaits += 1
                return .partitionLocked
            case .range, nil: return pass.taken > takenBefore ? .taken : .left
            }
        } catch {
            switch error.remedy {
            case .reconnect: throw error
            case .retry: return .rowsLocked
            case .fixData:
                pass.note(error, of: queue.name)
                return .dataRefused
            case .fixSetup:
                pass.note(error, of: queue.name)
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
            if refusal == nil, error.remedy == .fixData { report(.batchSetAside(queue.name, error)) }
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
                try queue.setAside(.pages(pages), of: partition, on: &connection)
            }
        } catch {
            // Another session has locked rows of the queue itself.
            if error.remedy == .retry { pass.lockWaits += 1 }
            throw error
        }
    }

    /// Takes these rows off the queue and records what they say.
    ///
    /// - Returns: The lock of another session that kept the batch from beginning, if there was one.
    func record(
        _ rows: RowRange, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        try inTransaction(rows, of: partition, into: &pass, on: &connection, report: report) {
            connection, pass throws(DatabaseError) in
            let terms = BatchTerms(guardLimits: guardLimits, rejectedAllowance: rejectedAllowance)
            switch try queue.record(rows, of: partition, terms, on: &connection) {
            case .empty: return nil
            case .allWait:
                pass.lockWaits += 1
                return nil
            case .done(let record): return record
            }
        }
    }

    /// Takes the locks of a batch, runs `work` and commits, then adds to the pass and reports what `work` has done. Rolls back if `work`
    /// returns nil.
    ///
    /// - Returns: The lock of another session that kept the batch from beginning, if there was one.
    func inTransaction(
        _ rows: RowRange, of partition: Partition, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report,
        _ work: (inout Connection, inout Drain.Pass) throws(DatabaseError) -> BatchRecord?
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
            for transition in recorded.transitions { report(.guardChanged(transition)) }
            return nil
        } catch {
            connection.rollback()
            rejectedAllowance.forgetCount()
            throw error
        }
    }
}
