import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// A topic of 40 tokens is protected as a large one is.
@Suite(.ownThread) struct `Small topics` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func register(_ topic: String, _ environment: String = "production", tokens: Int = 40) throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), '\(topic)', '\(environment)', now() - interval '30 days'))
            FROM generate_series(1, \(tokens)) AS i
            """)
    }

    /// Results for tokens number `numbers` of a topic.
    private func fail(_ topic: String, _ numbers: ClosedRange<Int>, status: Int, body: String) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT '\(topic)', lpad(to_hex(i), 8, '0'), \(status), \(body) FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS i
            """)
    }

    private func drain() throws {
        var daemon = try database.connect(user: "a_daemon")
        // The defaults of guard.allowance and guard.max_share.
        try drainAll(
            &daemon,
            drain: Drain(
                lockTimeout: .milliseconds(50),
                guardLimits: GuardLimits(allowance: 5, maxShare: Share(millionths: 5_000)),
                interpret: Interpretation.verdict(on:)))
    }

    private func warnings(_ words: String) throws -> String {
        try database.psql(
            "SELECT w FROM tokenkeeper.status, unnest(warnings) AS w WHERE w LIKE '%\(words)%' ORDER BY 1",
            user: "a_reader")
    }

    @Test func `three topics whose tokens are all bad stay sendable, and the warning names the other environment`()
        throws
    {
        for topic in ["a", "b", "c"] {
            try register(topic)
            try fail(topic, 1...40, status: 400, body: #"'{"reason":"BadDeviceToken"}'"#)
        }
        // A test build: its tokens belong to the sandbox.
        try register("b", "sandbox", tokens: 38)
        try drain()
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "0")
        let tripped = try warnings("guard of % tripped").split(separator: "\n")
        #expect(tripped.count == 3, "\(tripped)")
        #expect(
            tripped.filter {
                $0.contains("40 of 40 active tokens within a day; 38 of them are registered in sandbox as well")
            }.count == 1, "\(tripped)")
    }

    @Test func `a topic that loses more than a fifth of its tokens within a day is warned of`() throws {
        try register("t")
        try register("large", tokens: 400)
        try fail("t", 1...8, status: 410, body: goneBody)
        try fail("large", 1...80, status: 410, body: goneBody)
        try drain()
        #expect(try warnings("within a day, 8") == "", "a fifth")
        try fail("t", 9...9, status: 410, body: goneBody)
        try drain()
        #expect(
            try warnings("within a day, 9")
                == "within a day, 9 of 40 active tokens of t (production) were suppressed by suspects, 410s or logouts from tables and files"
        )
        // Suspects of a test build, a few a day.
        try register("u", tokens: 20)
        try register("u", "sandbox", tokens: 4)
        try fail("u", 1...5, status: 400, body: #"'{"reason":"BadDeviceToken"}'"#)
        try drain()
        #expect(
            try warnings("active tokens of u").contains(
                "within a day, 5 of 20 active tokens of u (production) were suppressed by suspects, 410s or logouts from tables and files; 4 of them are registered in sandbox as well: does the app report the right environment?"
            ))
        // The next day.
        try database.psql("UPDATE tokenkeeper.suppression_count SET hour = hour - interval '1 day'")
        #expect(try warnings("within a day") == "")
    }

    @Test func `a topic without registrations, and one that loses four tokens, are not warned of`() throws {
        try fail("unknown", 1...30, status: 410, body: goneBody)
        try register("t", tokens: 6)
        try fail("t", 1...4, status: 410, body: goneBody)
        try drain()
        #expect(try warnings("within a day") == "")
    }
}
