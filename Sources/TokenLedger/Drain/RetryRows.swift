/// The retry partition: rows that could not be recorded with their batch are retried together, then one by one.
extension BatchRunner {
    /// Tries a batch of the retry partition. If the batch fails, or all of it has to wait, tries its rows one by one. Bulky rows
    /// are always tried alone.
    func retry(
        _ pages: Range<Int>, into pass: inout Drain.Pass, on connection: inout Connection, report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        let takenBefore = pass.taken
        let hasFailed: Bool
        do {
            if let refusal = try record(
                .pages(pages), of: queue.name.retry, into: &pass, on: &connection, report: report)
            {
                return refusal
            }
            hasFailed = false
        } catch {
            if error.remedy == .reconnect { throw error }
            if error.remedy == .retry { pass.lockWaits += 1 }
            hasFailed = true
        }
        // If every row of a batch waits, the rows may still succeed one by one.
        let waits = !hasFailed && pass.taken == takenBefore
        let rows = try rowsSetAside(pages, onlyBulky: !hasFailed && !waits, on: &connection)
        try retryRows(rows, maxBlocked: waits ? 3 : 10, into: &pass, on: &connection, report: report)
        return nil
    }

    private typealias RetryRow = (position: RowRange, length: Int)

    private func rowsSetAside(
        _ pages: Range<Int>, onlyBulky: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> [RetryRow] {
        let rows = try connection.run(
            """
            \(transaction.settings)
            SELECT (ctid::text::point)[0]::bigint, (ctid::text::point)[1]::bigint, \(queue.length)
            FROM \(queue.name.retry.table)
            WHERE \(RowRange.pages(pages).predicate) \(onlyBulky ? "AND \(queue.isBulky)" : "")
            -- In random order: otherwise a row behind those that block would never have its turn.
            ORDER BY random() LIMIT 1000
            """)
        return try rows.decode { row throws(DatabaseError) in
            (.row(page: try row.read(), line: try row.read()), try row.read())
        }
    }

    /// - Parameter maxBlocked: Once this many rows could not be taken, the rest has to wait.
    private func retryRows(
        _ rows: [RetryRow], maxBlocked: Int, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) {
        let began = ContinuousClock.now
        var blocked = 0
        var setupError: DatabaseError?
        for row in rows {
            let takenBefore = pass.taken
            do {
                try retryRow(row, into: &pass, on: &connection, report: report)
            } catch {
                if error.remedy == .reconnect { throw error }
                if error.remedy == .retry { pass.lockWaits += 1 }
                if error.remedy == .fixSetup { setupError = error }
            }
            if pass.taken == takenBefore { blocked += 1 }
            // Each blocked row may cost a lock timeout. Other rows must not wait for that, nor for many large rows.
            if blocked == maxBlocked || .now > began + .seconds(blocked > 0 ? 1 : 5) { break }
        }
        if let setupError { throw setupError }
    }

    /// A row of so many bytes, as stored, is not too long: compressed to 1/255 it has no more than `tokenkeeper.largest_row()`.
    private static let surelyShort = 1 << 16

    /// What is wrong with a row that is too long. It is rejected unread: memory stays bounded.
    private func sizeFault(
        of row: RetryRow, on connection: inout Connection
    ) throws(DatabaseError) -> String? {
        if row.length <= Self.surelyShort { return nil }
        return try connection.run(
            """
            \(transaction.settings)
            SELECT \(queue.sizeFault) FROM \(queue.name.retry.table) WHERE \(row.position.predicate)
            """
        ).first { row throws(DatabaseError) in try row.read(String?.self) } ?? nil
    }

    private func retryRow(
        _ row: RetryRow, into pass: inout Drain.Pass, on connection: inout Connection, report: Drain.Report
    ) throws(DatabaseError) {
        if let fault = try sizeFault(of: row, on: &connection) {
            _ = try reject(row, error: fault, isCut: true, into: &pass, on: &connection, report: report)
            return
        }
        do {
            _ = try record(row.position, of: queue.name.retry, into: &pass, on: &connection, report: report)
        } catch let error where error.remedy == .fixData {
            let message = "the database refused to record it: \(error)"
            if try reject(row, error: message, into: &pass, on: &connection, report: report) {
                report(.rowRejected(queue.name, error))
            }
        }
    }

    /// - Returns: False when another session had the row locked, or the row was gone.
    private func reject(
        _ row: RetryRow, error: String, isCut: Bool = false, into pass: inout Drain.Pass,
        on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> Bool {
        let takenBefore = pass.taken
        _ = try inTransaction(row.position, of: queue.name.retry, into: &pass, on: &connection, report: report) {
            connection, _ throws(DatabaseError) in
            try rejectedAllowance.refresh(on: &connection)
            let isKept = rejectedAllowance.takes(bytes: isCut ? 0 : row.length)
            let rejected = try queue.reject(
                row.position, of: queue.name.retry, error: error, isKept: isKept, isCut: isCut, on: &connection)
            if rejected == nil { rejectedAllowance.forgetCount() }
            return rejected
        }
        return pass.taken > takenBefore
    }
}
