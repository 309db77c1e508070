import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// The limits of `topic_policy` on sending: the functions that the claims and `enqueue` call.
@Suite(.ownThread) struct `Limits on sending` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("INSERT INTO tokenkeeper.topic_policy (topic) VALUES ('t'), ('other')", user: "a_operator")
    }

    private static let topicID = "(SELECT topic_id FROM tokenkeeper.topic WHERE topic = 't')"

    private func policy(_ change: String) throws {
        try database.psql("UPDATE tokenkeeper.topic_policy SET \(change) WHERE topic = 't'", user: "a_operator")
    }

    // MARK: - Alerts per day

    /// Counts alerts for these tokens as a daemon does, and returns the positions of those that are over the limit.
    private func refused(_ tokens: String...) throws -> String {
        let keys = tokens.map { "'\\x\($0)'::bytea" }.joined(separator: ", ")
        return try database.psql(
            "SELECT string_agg(p::text, ' ' ORDER BY p) FROM tokenkeeper.note_alerts(\(Self.topicID), ARRAY[\(keys)]) AS p",
            user: "a_daemon")
    }

    @Test func `a device gets its alerts of a day, and the first ones of a set`() throws {
        #expect(try refused("aa", "aa", "aa") == "", "without a policy there is no limit")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.alert_send") == "0")
        try policy("alerts_per_day = 2")
        #expect(try refused("aa", "bb", "aa", "aa") == "4")
        #expect(try refused("aa", "bb", "cc", "bb") == "1 4")
        #expect(try refused("dd", "dd", "dd") == "3")
        try policy("alerts_per_day = 3")
        #expect(try refused("aa", "aa") == "2", "a higher limit leaves room for what exceeds the lower one")
        try policy("alerts_per_day = 1")
        #expect(try refused("aa") == "1")
        #expect(try database.psql("SELECT alerts FROM tokenkeeper.alert_send WHERE token_key = '\\xaa'") == "3")
        try policy("alerts_per_day = 0")
        #expect(try refused("aa") == "", "0 is no limit")
    }

    @Test func `another day begins with nothing`() throws {
        try policy("alerts_per_day = 1")
        #expect(try refused("aa", "bb") == "")
        try database.psql("UPDATE tokenkeeper.alert_send SET day = day - 1 WHERE token_key = '\\xaa'")
        #expect(try refused("aa", "bb") == "2")
        #expect(try refused("aa") == "1")
    }

    @Test func `forget erases the count of a device, and a sweep old ones`() throws {
        try policy("alerts_per_day = 1")
        try database.psql(
            "SELECT tokenkeeper.register('aa', 't', user_id => 'u'), tokenkeeper.register('bb', 't')", user: "a_app")
        #expect(try refused("aa", "bb", "cc") == "")
        try database.psql("SELECT tokenkeeper.forget_user('u')", user: "a_operator")
        #expect(try keys() == "\\xbb \\xcc")
        try database.psql("SELECT tokenkeeper.forget('bb')", user: "a_operator")
        #expect(try keys() == "\\xcc")
        try database.psql(
            "INSERT INTO tokenkeeper.alert_send VALUES (\(Self.topicID), '\\xdd', (now() AT TIME ZONE 'UTC')::date - 3, 1, 0)"
        )
        var daemon = try database.connect(user: "a_daemon")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 1000, maxShare: .percent(10), batch: 1)
        try SweepLease.request(.cli, on: &daemon)
        let lease = try #require(try SweepLease.claim(.requested, holder: "me", on: &daemon))
        _ = try Sweep(lease, plan, lockTimeout: .milliseconds(100)).perform(on: &daemon) { true }
        #expect(try keys() == "\\xcc")
    }

    private func keys() throws -> String {
        try database.psql("SELECT string_agg(token_key::text, ' ' ORDER BY token_key) FROM tokenkeeper.alert_send")
    }

    // MARK: - Requests per second

    /// How many requests may be claimed now; nil if the topic has no rate.
    private func slots() throws -> Int? {
        Int(try database.psql("SELECT requests FROM tokenkeeper.topic_slots(\(Self.topicID))", user: "a_daemon"))
    }

    /// Takes slots from now on.
    private func take(_ requests: Int) throws {
        try database.psql(
            "SELECT tokenkeeper.take_topic_slots(\(Self.topicID), clock_timestamp(), \(requests))", user: "a_daemon")
    }

    /// Whether the next claim of the topic is so many seconds away, by the database's clock.
    private func waits(for seconds: ClosedRange<Double>) throws -> Bool {
        try database.psql(
            """
            SELECT extract(epoch FROM r.next_send_at - clock_timestamp()) BETWEEN \(seconds.lowerBound) AND \(seconds.upperBound)
            FROM tokenkeeper.topic_rate AS r WHERE r.topic_id = \(Self.topicID)
            """) == "t"
    }

    @Test func `a topic without a rate may claim all, and leaves no trace`() throws {
        #expect(try slots() == nil)
        try take(1000)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic_rate") == "0")
        #expect(try database.psql("SELECT requests FROM tokenkeeper.topic_slots(NULL)") == "", "a topic nobody knows")
    }

    @Test func `a topic may claim the next second's worth, and what is late by a quarter of a second`() throws {
        try policy("max_per_second = 1000")
        #expect(try slots() == 1250)
        // A batch may be larger: it delays what follows.
        try take(60_000)
        #expect(try waits(for: 30...60))
        #expect(try slots() == 0)
        try database.psql("UPDATE tokenkeeper.topic_rate SET next_send_at = clock_timestamp() - interval '1 hour'")
        #expect(try slots() == 1250, "what was not used in time is lost")
        try policy("max_per_second = 1")
        #expect(try slots() == 1)
        try policy("max_per_second = 2147483647")
        #expect(try slots() == 1_000_000)
        try policy("max_per_second = NULL")
        #expect(try slots() == nil)
    }

    @Test
    func `a claim takes slots while less than half a second of the rate is taken, and half a second's worth or more`()
        throws
    {
        func free(_ ahead: String) throws -> Int {
            Int(
                try database.psql(
                    "SELECT requests FROM tokenkeeper.free_slots(clock_timestamp() + interval '\(ahead)', 1000)",
                    user: "a_daemon")) ?? -1
        }
        // The clock goes on between the two readings of it.
        #expect((500...1000).contains(try free("490 milliseconds")))
        #expect((1000...1250).contains(try free("0")))
        #expect(try free("1 minute") == 0)
        let ahead = try database.psql(
            "SELECT (extract(epoch FROM tokenkeeper.slots_ahead()) * 1000)::integer", user: "a_daemon")
        #expect(Outbox.pacedAhead == .milliseconds(try #require(Int(ahead))), "the daemon asks when it may get some")
    }

    @Test func `a topic whose only trace is a rate that was withdrawn is unused`() throws {
        try policy("max_per_second = 5")
        _ = try slots()
        try database.psql("UPDATE tokenkeeper.topic SET first_seen = now() - interval '2 days'")
        let unused = "SELECT cardinality(tokenkeeper.unused_topics(ARRAY[\(Self.topicID)], now()))"
        #expect(try database.psql(unused) == "0")
        try policy("max_per_second = NULL")
        #expect(try database.psql(unused) == "1")
        try database.psql("SELECT tokenkeeper.reap_topics(0, now())")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic_rate") == "0")
    }

    // MARK: - Confirmation

    private func fault(tags: String? = nil, everyone: Bool = false, tokens: Int? = nil) throws -> String {
        try database.psql(
            """
            SELECT tokenkeeper.confirmation_fault(\(Self.topicID), \(tags.map { "'\($0)'" } ?? "NULL"), \(everyone),
                                                  \(tokens.map(String.init) ?? "NULL"))
            """)
    }

    @Test func `the refusal of an audience that is barely too large does not name the same share twice`() throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 1001) AS i",
            user: "a_app")
        try policy("confirm_share = 0.5")
        let end = "of the tokens of t (production), and more than 50 % need confirm => true"
        #expect(try fault(tokens: 500) == "")
        #expect(try fault(tokens: 501) == "the audience is just over 50 % \(end)")
        #expect(try fault(tokens: 511) == "the audience is about 51 % \(end)")
    }

    @Test func `a list of tokens and everyone are judged by their share`() throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 200) AS i",
            user: "a_app")
        #expect(try fault(everyone: true) == "", "the default: nobody has to confirm")
        try policy("confirm_share = 0.405")
        #expect(
            try fault(everyone: true)
                == "the audience is about 100 % of the tokens of t (production), and more than 40.5 % need confirm => true"
        )
        #expect(try fault(tokens: 81) == "")
        #expect(try fault(tokens: 82).hasPrefix("the audience is about 41 %"))
        try policy("confirm_share = 0")
        #expect(try fault(tokens: 50) == "", "a test on some devices needs no confirmation")
        #expect(try fault(tokens: 51) != "")
        try policy("confirm_share = 1")
        #expect(try fault(everyone: true) == "" && fault(tokens: 300) == "")
    }
}
