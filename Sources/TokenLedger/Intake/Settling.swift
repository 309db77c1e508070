internal import TokenModel

/// One batch after the other, each a transaction, and what is done when one fails.
extension Intake {
    /// One batch; if it fails for a cause of its own, its rows are set aside, and there looked at one by one.
    func settle(
        _ pages: Range<Int>, of leaf: Leaf, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void
    ) throws(DatabaseError) {
        do {
            try settle(.pages(pages), of: leaf, asideUnseen: false, into: &pass, on: &connection, tell: tell)
        } catch {
            if error.remedy == .reconnect { throw error }
            if leaf == .aside {
                return try settleRowByRow(pages, onlyBulky: false, into: &pass, on: &connection, tell: tell)
            }
            do {
                try settle(.pages(pages), of: leaf, asideUnseen: true, into: &pass, on: &connection, tell: tell)
            } catch let error where error.remedy == .retry {
                // Somebody holds rows of the queue itself. They stay where they are.
                return
            }
            if error.remedy == .fixData { tell(.batchSetAside(error)) }
            return
        }
        if leaf == .aside { try settleRowByRow(pages, onlyBulky: true, into: &pass, on: &connection, tell: tell) }
    }

    /// Looks at rows that were set aside one by one: those that are bulky, and those that made their batch fail.
    private func settleRowByRow(
        _ pages: Range<Int>, onlyBulky: Bool, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void
    ) throws(DatabaseError) {
        let left = try connection.run(
            """
            \(transaction.settings)
            SELECT (ctid::text::point)[0]::bigint, (ctid::text::point)[1]::bigint, \(Batch.length)
            FROM \(Leaf.aside.table)
            WHERE \(Portion.pages(pages).predicate) \(onlyBulky ? "AND \(Batch.length) > \(Batch.bulky)" : "")
            -- So that none is always behind those that block.
            ORDER BY random() LIMIT 1000
            """)
        var blocked = 0
        var trouble: DatabaseError?
        for row in 0..<left.count {
            guard let page = left.text(row, 0).flatMap({ Int($0) }), let line = left.text(row, 1).flatMap({ Int($0) }),
                let length = left.text(row, 2).flatMap({ Int($0) })
            else { continue }
            do {
                let before = pass
                try settleRow(.row(page: page, line: line), length, into: &pass, on: &connection, tell: tell)
                if pass == before { blocked += 1 }
            } catch {
                if error.remedy == .reconnect { throw error }
                if error.remedy == .fixSetup { trouble = error }
                blocked += 1
            }
            // Each of them may cost a lock timeout: the others in the queue must not wait for them.
            if blocked == 10 { break }
        }
        if let trouble { throw trouble }
    }

    private func settleRow(
        _ row: Portion, _ length: Int, into pass: inout Pass, on connection: inout Connection, tell: (Incident) -> Void
    ) throws(DatabaseError) {
        do {
            if length > Self.largestRow {
                try reject(
                    row, error: "the row is \(length) bytes long, expected at most \(Self.largestRow)", on: &connection)
                pass.rejected += 1
            } else {
                try settle(row, of: .aside, asideUnseen: false, into: &pass, on: &connection, tell: tell)
            }
        } catch let error where error.remedy == .fixData {
            try reject(row, error: "the database refused to record it: \(error)", on: &connection)
            pass.rejected += 1
            tell(.rowRejected(error))
        }
    }

    /// A row of more than 16 MiB of text is not fetched to look what it means: memory stays bounded.
    private static let largestRow = 1 << 24

    private func reject(_ portion: Portion, error: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            try connection.run(
                "SELECT pg_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.forgetting))")
            try Batch.reject(portion, of: .aside, error: error, on: &connection)
        }
    }

    private func settle(
        _ portion: Portion, of leaf: Leaf, asideUnseen: Bool, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void
    ) throws(DatabaseError) {
        var isAtGuard = false
        defer { if isAtGuard { pair?.leaveGuard() } }
        do {
            let range = Advisory.range(leaf: leaf, firstPage: portion.firstPage)
            guard
                try transaction.beginTaking(
                    """
                    pg_try_advisory_xact_lock(\(Advisory.lockClass), \(range))
                    AND pg_try_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.leaf(leaf)))
                    """, on: &connection)
            else { return connection.rollback() }
            let settled: Pass
            var turns: [GuardTurn] = []
            if asideUnseen {
                settled = try Batch.moveAside(portion, of: leaf, on: &connection)
                if !settled.moved { return connection.rollback() }
            } else {
                let batch = try Batch.take(portion, of: leaf, interpret: interpret, on: &connection)
                if batch.hasSuspects { isAtGuard = pair?.enterGuard() ?? false }
                guard batch.taken > 0, let done = try batch.settle(from: leaf, guardLimits, on: &connection) else {
                    return connection.rollback()
                }
                (settled, turns) = done
            }
            try connection.commit()
            pass.add(settled)
            for turn in turns { tell(.guardTurned(turn)) }
        } catch {
            connection.rollback()
            throw error
        }
    }
}

extension BatchTransaction {
    /// Begins one that takes results off the queue.
    ///
    /// - Parameter locks: An SQL condition that takes the locks of those results.
    /// - Returns: False when another daemon has one of the locks, or `forget` is at work: roll back.
    func beginTaking(_ locks: String, on connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.run(
            """
            \(begin)
            -- The planner knows nothing of a queue: it would sort what is to be counted.
            SET LOCAL enable_sort = off;
            SELECT \(locks) AND pg_try_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.forgetting))
            """
        ).text(0, 0) == "t"
    }
}
