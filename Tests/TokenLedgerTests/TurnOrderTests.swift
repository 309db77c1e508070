import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite struct `The order of turns` {
    private func sizes(_ pages: [Int], current: Int = 0, _ queue: QueueName = .results) -> PartitionSizes {
        PartitionSizes(
            queue: queue, pages: pages, current: Partition(queue, current), before: Partition(queue, current))
    }

    @Test func `each round begins with the current partition, then come the backlog and the oldest`() {
        var order = TurnOrder(sizes([9, 9, 0, 0, 0, 0, 0, 9, 9, 9]))
        for _ in 1...2 {
            for number in [0, 9, 1, 7] {
                #expect(!order.isFinished)
                let partition = order.next()
                #expect(partition.number == number)
                order.ended(partition, isDrained: false, hasReadInBulk: false)
            }
        }
        #expect(!order.isFinished)
    }

    @Test func `a drained partition has no further turn, and the current one is looked at again`() {
        var order = TurnOrder(sizes([9, 9, 0, 0, 0, 0, 0, 0, 0, 0]))
        var seen: [Int] = []
        while !order.isFinished {
            let partition = order.next()
            seen.append(partition.number)
            order.ended(partition, isDrained: true, hasReadInBulk: false)
        }
        #expect(seen == [0, 1])
        let again = order.next()
        #expect(again.number == 0 && !order.isFinished)
        order.ended(again, isDrained: false, hasReadInBulk: false)
        #expect(!order.isFinished, "rows have come")
    }

    @Test func `after a bulk read the current partition is next, and the backlog has rows`() {
        var order = TurnOrder(sizes([9, 9, 9, 0, 0, 0, 0, 0, 0, 0]))
        #expect(order.next().number == 0)
        let read = order.next()
        order.ended(read, isDrained: true, hasReadInBulk: true)
        #expect([order.next(), order.next(), order.next()].map(\.number) == [0, 2, 9])
    }

    @Test func `an empty queue has no turn`() {
        #expect(TurnOrder(sizes(Array(repeating: 0, count: 9), .registrations)).isFinished)
        #expect(!TurnOrder(sizes([1] + Array(repeating: 0, count: 8), .registrations)).isFinished)
    }
}

@Suite(.ownThread) struct `Both queues at once` {
    let database: TestDatabase

    init() throws { database = try TestCluster.shared.database() }

    private static let death = #"'{"reason":"Unregistered","timestamp":1794000000123}'"#

    /// Queues a backlog in some sealed partitions, begins to drain it, and queues a row for the other queue in the middle of it.
    ///
    /// - Returns: Whether that row was done before the backlog was.
    private func isPrompt(backlog: String, row: String, isDone: String, left: String) throws -> Bool {
        let current = Int(try database.psql("SELECT \(Partition.currentInSQL)"))!
        for ahead in 3...5 {
            try database.psql(backlog.replacing("PARTITION", with: "\((current + ahead) % 8)"))
        }
        // Another partition may become the current one in the middle of a pass, which lasts some seconds at most.
        let row = row.replacing("PARTITION", with: "\(current)")
        var daemon = try database.connect(user: "a_daemon")
        var app = try database.connect()
        var drain = Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, truncates: false, interpret: Interpretation.verdict(on:))
        var batches = 0
        var wasPrompt = false
        var isOver = false
        while !wasPrompt, !isOver {
            _ = try drain.pass(
                on: &daemon, report: { _ in },
                betweenBatches: { _, _, _ throws(DatabaseError) in
                    batches += 1
                    if batches == 2 { try app.run(row) }
                    if batches > 2, try app.run("SELECT WHERE \(isDone)").count == 1 {
                        wasPrompt = try app.run("SELECT FROM \(left) LIMIT 1").count == 1
                        isOver = true
                    }
                    return !isOver
                })
        }
        return wasPrompt
    }

    @Test func `registrations do not wait behind a backlog of results`() throws {
        #expect(
            try isPrompt(
                backlog: """
                    INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
                    SELECT 't', 'PARTITION0' || lpad(to_hex(i), 8, '0'), 410, \(Self.death), PARTITION FROM generate_series(1, 12000) AS i
                    """,
                row:
                    "INSERT INTO tokenkeeper.registration (topic, token, partition_number) VALUES ('t', 'ff', PARTITION)",
                isDone: "EXISTS (SELECT FROM tokenkeeper.ledger WHERE token_key = '\\xff')",
                left: "tokenkeeper.send_result"))
    }

    @Test func `results do not wait behind a backlog of registrations`() throws {
        #expect(
            try isPrompt(
                backlog: """
                    INSERT INTO tokenkeeper.registration (topic, token, partition_number)
                    SELECT 't', 'PARTITION0' || lpad(to_hex(i), 8, '0'), PARTITION FROM generate_series(1, 12000) AS i
                    """,
                row:
                    "INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number) VALUES ('t', 'ff', 410, \(Self.death), PARTITION)",
                isDone: "EXISTS (SELECT FROM tokenkeeper.ledger WHERE token_key = '\\xff')",
                left: "tokenkeeper.registration"))
    }
}
