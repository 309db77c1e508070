/// The retry partition: rows that could not be recorded with their batch are retried together, then one by one.
extension BatchRunner {
    /// Tries a batch of the retry partition. If the batch fails, or all of it has to wait, tries its rows one by one. Bulky rows
    /// are always tried alone.
    func retry(
        _ pages: Range<Int>, into pass: inout Drain.Pass, on connection: inout Connection, report: Drain.Report
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        let takenBefore = pass.taken
        refused.prune(at: .now)
        var hasFailed = false
        do {
            // A row that is refused would fail the batch.
            if refused.isEmpty {
                let refusal = try record(
                    .pages(pages), of: queue.name.retry, into: &pass, on: &connection, report: report)
                if let refusal { return refusal }
            } else {
                hasFailed = true
            }
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

    private struct RetryRow {
        var key: RefusedRows.Key
        var length: Int
        var position: RowRange { .row(page: key.page, line: key.line) }
    }

    private func rowsSetAside(
        _ pages: Range<Int>, onlyBulky: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> [RetryRow] {
        let rows = try connection.run(
            """
            \(transaction.settings)
            SELECT (ctid::text::point)[0]::bigint, (ctid::text::point)[1]::bigint, xmin::text, \(queue.length)
            FROM \(queue.name.retry.table)
            WHERE \(RowRange.pages(pages).predicate) \(onlyBulky ? "AND \(queue.isBulky)" : "")
            -- In random order: otherwise a row behind those that block would never have its turn.
            ORDER BY random() LIMIT 1000
            """)
        return try rows.decode { row throws(DatabaseError) in
            RetryRow(
                key: RefusedRows.Key(page: try row.read(), line: try row.read(), transaction: try row.read()),
                length: try row.read())
        }.filter { !refused.rests($0.key, at: .now) }
    }

    /// - Parameter maxBlocked: Once this many rows could not be taken, the rest has to wait.
    private func retryRows(
        _ rows: [RetryRow], maxBlocked: Int, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) {
        let began = ContinuousClock.now
        var blocked = 0
        var setupError: DatabaseError?
        // Whether PostgreSQL takes a row of ours, so that what it refuses is the row's own.
        var takesOurs = false
        for row in rows {
            let takenBefore = pass.taken
            do {
                try retryRow(row, &takesOurs, into: &pass, on: &connection, report: report)
            } catch {
                if error.remedy == .reconnect { throw error }
                if error.remedy == .retry { pass.lockWaits += 1 }
                if error.remedy == .fixSetup { setupError = error }
                if refused.areAll { break }
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

    /// - Throws: If PostgreSQL refuses any row.
    private func retryRow(
        _ row: RetryRow, _ takesOurs: inout Bool, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) {
        if let fault = try sizeFault(of: row, on: &connection) {
            try reject(row, error: fault, into: &pass, on: &connection, report: report)
            return
        }
        do {
            _ = try record(row.position, of: queue.name.retry, into: &pass, on: &connection, report: report)
            refused.took(row.key)
        } catch let error where error.remedy == .fixSetup {
            refused.refused(row.key, error, at: .now)
            throw error
        } catch let error where error.remedy == .fixData {
            if !takesOurs {
                refused.areAll = true
                try tryOurs(on: &connection)
                (refused.areAll, takesOurs) = (false, true)
            }
            refused.refused(row.key, error, at: .now)
            report(.rowRefused(queue.name, error))
        }
    }

    /// Writes a row of ours to the retry partition, records it, and rolls back.
    ///
    /// - Throws: If PostgreSQL refuses it, too: then a person must act, whatever the error is.
    private func tryOurs(on connection: inout Connection) throws(DatabaseError) {
        do {
            defer { connection.rollback() }
            if try transaction.beginTaking(queue.name.retry, firstPage: 0, on: &connection) != nil { return }
            let (page, line): (Int, Int) = try connection.query(
                """
                WITH ours AS (
                    INSERT INTO \(queue.name.retry.table) (\(queue.sampleColumns), partition_number)
                    VALUES (\(queue.sample), \(queue.name.retry.number)) RETURNING ctid
                )
                SELECT (o.ctid::text::point)[0]::bigint, (o.ctid::text::point)[1]::bigint FROM ours AS o
                """
            ).one { row throws(DatabaseError) in (try row.read(), try row.read()) }
            let terms = BatchTerms(guardLimits: guardLimits, rejectedAllowance: rejectedAllowance)
            _ = try queue.record(.row(page: page, line: line), of: queue.name.retry, terms, on: &connection)
            rejectedAllowance.forgetCount()
        } catch {
            rejectedAllowance.forgetCount()
            // Another session was in the way: nothing speaks against the setup.
            if error.remedy == .retry { return }
            throw error.remedy == .fixData ? error.ofSetup : error
        }
    }

    /// Rejects a row that is too long.
    private func reject(
        _ row: RetryRow, error: String, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) {
        _ = try inTransaction(row.position, of: queue.name.retry, into: &pass, on: &connection, report: report) {
            connection, _ throws(DatabaseError) in
            try rejectedAllowance.refresh(on: &connection)
            let isKept = rejectedAllowance.takes(bytes: 0)
            let rejected = try queue.reject(
                row.position, of: queue.name.retry, error: error, isKept: isKept, on: &connection)
            if rejected == nil { rejectedAllowance.forgetCount() }
            return rejected
        }
    }
}
