internal import TokenModel

/// One batch after the other, each a transaction, and what is done when one fails.
extension Drain {
    /// One batch; if it fails for a cause of its own, its rows are left for a retry, and there looked at one by one.
    ///
    /// - Returns: Which lock of another session kept it from beginning, if one did.
    /// - Throws: Among others an error to `retry` when another session holds rows of the range itself.
    func settle(
        _ pages: Range<Int>, of partition: Partition, into pass: inout Pass, on connection: inout Connection,
        report: (Incident) -> Void
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        let before = pass
        do {
            let refusal = try settle(
                .pages(pages), of: partition, retryUnseen: false, into: &pass, on: &connection, report: report)
            if let refusal { return refusal }
        } catch {
            if error.remedy == .reconnect { throw error }
            if error.remedy == .retry { pass.lockWaits += 1 }
            if partition == .retry {
                try settleRowByRow(
                    pages, onlyBulky: false, mostBlocked: 10, into: &pass, on: &connection, report: report)
                return nil
            }
            let refusal: DrainLock.Refusal?
            do {
                refusal = try settle(
                    .pages(pages), of: partition, retryUnseen: true, into: &pass, on: &connection, report: report)
            } catch let error where error.remedy == .retry {
                // Somebody holds rows of the queue itself. They stay where they are.
                pass.lockWaits += 1
                throw error
            }
            if refusal == nil, error.remedy == .fixData { report(.batchSetAside(error)) }
            return refusal
        }
        if partition == .retry {
            // A batch of which everything waits is looked at row by row, too: it may only be too much at once.
            let waits = pass.taken == before.taken
            try settleRowByRow(
                pages, onlyBulky: !waits, mostBlocked: waits ? 3 : 10, into: &pass, on: &connection, report: report)
        }
        return nil
    }

    /// Looks at rows that were left for a retry one by one: those that are bulky, and those of a batch that failed or had to wait as a whole.
    ///
    /// - Parameter mostBlocked: It ends after so many that could not be had.
    private func settleRowByRow(
        _ pages: Range<Int>, onlyBulky: Bool, mostBlocked: Int, into pass: inout Pass, on connection: inout Connection,
        report: (Incident) -> Void
    ) throws(DatabaseError) {
        let left = try connection.run(
            """
            \(transaction.settings)
            SELECT (ctid::text::point)[0]::bigint, (ctid::text::point)[1]::bigint, \(Batch.length)
            FROM \(Partition.retry.table)
            WHERE \(RowRange.pages(pages).predicate) \(onlyBulky ? "AND \(Batch.length) > \(Batch.bulky)" : "")
            -- So that none is always behind those that block.
            ORDER BY random() LIMIT 1000
            """)
        let began = ContinuousClock.now
        var blocked = 0
        var trouble: DatabaseError?
        for row in 0..<left.count {
            guard let page = left.text(row, 0).flatMap({ Int($0) }), let line = left.text(row, 1).flatMap({ Int($0) }),
                let length = left.text(row, 2).flatMap({ Int($0) })
            else { continue }
            do {
                let before = pass
                try settleRow(.row(page: page, line: line), length, into: &pass, on: &connection, report: report)
                if pass.taken == before.taken { blocked += 1 }
            } catch {
                if error.remedy == .reconnect { throw error }
                if error.remedy == .retry { pass.lockWaits += 1 }
                if error.remedy == .fixSetup { trouble = error }
                blocked += 1
            }
            // Each of them may cost a lock timeout: the others in the queue must not wait for them.
            if blocked == mostBlocked || blocked > 0 && .now > began + .seconds(1) { break }
        }
        if let trouble { throw trouble }
    }

    private func settleRow(
        _ row: RowRange, _ length: Int, into pass: inout Pass, on connection: inout Connection,
        report: (Incident) -> Void
    ) throws(DatabaseError) {
        do {
            if length > Self.largestRow {
                _ = try reject(
                    row, length, error: "the row is \(length) bytes long, expected at most \(Self.largestRow)",
                    into: &pass, on: &connection)
            } else {
                _ = try settle(row, of: .retry, retryUnseen: false, into: &pass, on: &connection, report: report)
            }
        } catch let error where error.remedy == .fixData {
            if try reject(
                row, length, error: "the database refused to record it: \(error)", into: &pass, on: &connection)
            {
                report(.rowRejected(error))
            }
        }
    }

    /// A row of more than 16 MiB of text is not fetched to look what it means: memory stays bounded.
    private static let largestRow = 1 << 24

    /// - Returns: False when a lock of another session kept it from that, or the row was gone already.
    private func reject(
        _ portion: RowRange, _ length: Int, error: String, into pass: inout Pass, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        do {
            if try transaction.beginTaking(.retry, firstPage: portion.firstPage, on: &connection) != nil {
                connection.rollback()
                return false
            }
            try rejectedAllowance.refresh(on: &connection)
            let (gone, notKept) = try Batch.reject(
                portion, of: .retry, error: error, isKept: rejectedAllowance.takes(bytes: length), on: &connection)
            try connection.commit()
            if gone == 0 { rejectedAllowance.forgetCount() }
            pass.rejected += gone
            pass.notKept += notKept
            return gone > 0
        } catch {
            connection.rollback()
            rejectedAllowance.forgetCount()
            throw error
        }
    }

    /// - Returns: Which lock of another session kept it from beginning, if one did.
    private func settle(
        _ portion: RowRange, of partition: Partition, retryUnseen: Bool, into pass: inout Pass,
        on connection: inout Connection,
        report: (Incident) -> Void
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        var isAtGuard = false
        defer { if isAtGuard { pair?.leaveGuard() } }
        do {
            if let refusal = try transaction.beginTaking(partition, firstPage: portion.firstPage, on: &connection) {
                connection.rollback()
                return refusal
            }
            let settled: Pass
            var turns: [GuardTransition] = []
            if retryUnseen {
                settled = try Batch.moveToRetry(portion, of: partition, on: &connection)
                if !settled.moved {
                    connection.rollback()
                    return nil
                }
            } else {
                let batch = try Batch.take(portion, of: partition, interpret: interpret, on: &connection)
                if batch.hasSuspects { isAtGuard = pair?.enterGuard() ?? false }
                guard batch.taken > 0,
                    let done = try batch.settle(from: partition, guardLimits, rejectedAllowance, on: &connection)
                else {
                    // What is in the retry partition already waits on: somebody holds all of its tokens.
                    if batch.taken > 0 { pass.lockWaits += 1 }
                    connection.rollback()
                    return nil
                }
                (settled, turns) = done
            }
            try connection.commit()
            pass.add(settled)
            for turn in turns { report(.guardChanged(turn)) }
            return nil
        } catch {
            connection.rollback()
            rejectedAllowance.forgetCount()
            throw error
        }
    }
}
