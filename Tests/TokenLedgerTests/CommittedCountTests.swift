import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// What the drain tells its caller, for metrics, is what it has committed to `result_count`.
@Suite(.ownThread) struct `Counts of committed results` {
    private let database: TestDatabase

    init() throws { database = try TestCluster.shared.database() }

    /// What passes report until nothing is left, as `result_stat` shows it.
    private func drained(_ drain: Drain, on daemon: inout Connection) throws -> [String] {
        var drain = drain
        var sums: [ResultKind: Int] = [:]
        while true {
            let pass = try drain.pass(
                on: &daemon,
                report: {
                    guard case .committed(let counts, _) = $0 else { return }
                    for count in counts { sums[count.kind, default: 0] += count.results }
                }, betweenBatches: { _, _, _ in true })
            if !pass.moved { break }
        }
        return sums.map { kind, results in
            let words = [kind.environment, kind.topic, kind.status.map { "\($0)" }, kind.reason].map { $0 ?? "" }
            return "\(words.joined(separator: "|"))|\(results)"
        }.sorted()
    }

    private func stored() throws -> [String] {
        try database.psql(
            "SELECT environment, topic, status, reason, sum(results) FROM tokenkeeper.result_stat GROUP BY 1, 2, 3, 4"
        ).split(separator: "\n").map(String.init).sorted()
    }

    private func makeDrain() -> Drain {
        Drain(
            lockTimeout: .milliseconds(50), guardLimits: GuardLimits(allowance: 3, maxShare: .percent(1)),
            rejectedPerHour: 5, interpret: Interpretation.verdict(on:))
    }

    private func queue(_ partition: String = "partition_number") throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, partition_number)
            SELECT e, CASE WHEN i % 3 > 0 THEN 't' || i % 3 END, lpad(to_hex(i), 8, '0'), s, b, p
            FROM generate_series(1, 8) AS i,
                 unnest('{production,sandbox,staging,NULL}'::text[]) AS e,
                 (VALUES (200, NULL), (200, repeat('x', 3000)), (410, \(goneBody)), (410, NULL), (410, '{"reason":"New"}'),
                         (400, '{"reason":"BadDeviceToken"}'), (403, '{"reason":"Forbidden"}'), (403, repeat('x', 3000)),
                         (503, NULL), (1234, NULL), (NULL, NULL)) AS v (s, b),
                 (SELECT \(partition)) AS p (p)
            """)
    }

    @Test func `batches report what they count: recorded, rejected, held, and tried again alone`() throws {
        try queue(Partition.currentInSQL)
        // More suspects than the guard allows.
        try database.psql(
            """
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 'g', registered_at => now() - interval '30 days')
            FROM generate_series(11, 20) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 'g', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(11, 20) AS i
            """)
        // PostgreSQL refuses this token in a batch, and alone.
        try database.psql("ALTER TABLE tokenkeeper.ledger ADD CHECK (token_key <> '\\x00000002') NOT VALID")
        var daemon = try database.connect(user: "a_daemon")
        let told = try drained(makeDrain(), on: &daemon)
        let stored = try stored()
        #expect(told == stored)
        for part in [
            "production|t1|200||", "production|g|400|BadDeviceToken|10", "sandbox|t2|410|Unregistered|",
            "||403|(rejected, not kept)|", "|(rejected)|",
        ] {
            #expect(stored.contains { $0.contains(part) }, "\(part)")
        }
        #expect(try database.psql("SELECT count(*) > 0 FROM tokenkeeper.held_result") == "t")
        let held = try database.psql("SELECT tokenkeeper.release_held('g')", user: "a_operator")
        #expect(held != "0")
        #expect(try drained(makeDrain(), on: &daemon) == [], "what was held has counted already")
    }

    @Test func `a bulk read reports what it counts`() throws {
        let sealed = "(\(Partition.currentInSQL) + 4) % 8"
        try queue(sealed)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number)
            SELECT 't' || i % 7, 'aa', 200, \(sealed) FROM generate_series(1, 20000) AS i
            """)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drained(makeDrain(), on: &daemon) == stored())
    }

    @Test func `of more than a thousand kinds of 200s, the smallest count as one`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number)
            SELECT 't' || i, 'aa', 200, 3 FROM generate_series(1, 1200) AS i
            UNION ALL SELECT 't' || i, 'aa', 200, 3 FROM generate_series(201, 1200) AS i
            """)
        var daemon = try database.connect(user: "a_daemon")
        let counts = try daemon.transaction(BatchTransaction(lockTimeout: .seconds(1))) {
            connection throws(DatabaseError) in
            try ResultQueue(interpret: Interpretation.verdict(on:)).countAccepted(
                .pages(0..<1000), of: Partition(.results, 3), settingAside: "false", on: &connection)
        }.counts
        #expect(counts.count == 1001)
        #expect(counts.dropLast().allSatisfy { $0.results == 2 && $0.kind.topic != nil })
        #expect(counts.last == ResultCount(kind: ResultKind(status: 200), results: 200))
    }

    @Test func `what is rolled back is not reported`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'aa', 200 FROM generate_series(1, 100);
            REVOKE INSERT ON tokenkeeper.result_count FROM tokenkeeper_daemon
            """)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drained(makeDrain(), on: &daemon) == [])
        #expect(try stored() == [])
    }
}
