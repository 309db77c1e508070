import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// What no `apns-topic` header can carry is refused wherever a topic comes in, with the same words.
@Suite(.ownThread) struct `Topics` {
    static let topics = [
        "com.example.app.voip", "~!'\"$,{}(%s)", String(repeating: "x", count: 512),
        // No device tokens: too short, an odd number of digits, and not byte by byte.
        hex(31), hex(32) + "a", "0x\(hex(31))", hex(16) + "-" + hex(16), "<\(hex(32))", "0x0x\(hex(32))",
    ]

    private static func hex(_ bytes: Int) -> String { String(repeating: "0a", count: bytes) }

    static let others: [(name: String, fault: String)] = [
        ("", "topic is missing, expected the apns-topic header"),
        (String(repeating: "x", count: 513), "topic is 513 bytes long, expected at most 512"),
        (" ", blank(at: 1)), ("   ", blank(at: 1)), ("com.example app", blank(at: 12)), (" com.example", blank(at: 1)),
        ("com.example\t", blank(at: 12)), ("com.example\n", blank(at: 12)), ("com.\u{7f}", blank(at: 5)),
        ("caf\u{e9}.example", blank(at: 4)), ("cafe\u{301}", blank(at: 5)), ("com\u{a0}example", blank(at: 4)),
        ("\u{feff}com.example", blank(at: 1)), ("\u{1F600}com.example\u{200b}", blank(at: 1)),
        (hex(32), token), (String(repeating: "aB", count: 100), token), ("0x\(hex(32))", token),
        ("\\x\(hex(32))", token),
        ("<\(hex(32))>", token), ("<0X\(hex(40))>", token),
        (Array(repeating: "aF", count: 32).joined(separator: "-"), token),
        (Array(repeating: "aF", count: 33).joined(separator: ":"), token),
    ]

    private static let token = "topic is a device token, expected the apns-topic header"

    private static func blank(at place: Int) -> String {
        "topic has a blank or a character that no header can carry at position \(place), expected visible ASCII"
    }

    private static func literal(_ name: String) -> String { "'\(name.replacing("'", with: "''"))'" }

    private func failure(_ body: () throws -> Void) -> String {
        do {
            try body()
            return ""
        } catch { return "\(error)" }
    }

    /// For COPY.
    private static let csv = (others.map(\.name) + topics).map { "\"\($0.replacing("\"", with: "\"\""))\",aa,200\n" }

    private static let rejected = others.map { "\($0.name.utf8.count)|\($0.fault)" }.sorted()

    @Test func `the daemon has the rule of the database`() throws {
        let database = try TestCluster.shared.database()
        for (name, fault) in Self.others {
            #expect(try database.psql("SELECT tokenkeeper.topic_fault(\(Self.literal(name)))") == fault)
            #expect(Topic.fault(of: name).map { "topic \($0)" } == fault && Topic(name) == nil)
        }
        for name in Self.topics {
            #expect(try database.psql("SELECT tokenkeeper.topic_fault(\(Self.literal(name))) IS NULL") == "t")
            #expect(Topic.fault(of: name) == nil && Topic(name)?.name == name)
        }
        #expect(
            try database.psql("SELECT tokenkeeper.topic_fault(NULL)")
                == "topic is missing, expected the apns-topic header")
    }

    @Test func `calls refuse them`() throws {
        let database = try TestCluster.shared.database()
        for (name, fault) in Self.others {
            let topic = Self.literal(name)
            for call in [
                "register('aa', \(topic))", "unregister('aa', \(topic))",
                "register(ARRAY[ROW('aa', \(topic), NULL, NULL, NULL, NULL, NULL, NULL)]::tokenkeeper.new_registration[])",
                "tag(\(topic), token => 'aa', add => '{x}')",
                "enqueue('{\"aps\":{\"alert\":\"x\"}}', \(topic), everyone => true)",
            ] {
                #expect(
                    failure { try database.psql("SELECT tokenkeeper.\(call)", user: "owner") }.contains(fault),
                    "\(call)")
            }
            #expect(
                try database.psql(
                    """
                    SELECT tokenkeeper.send_fault('production', \(topic), '{"aps":{"alert":"x"}}', 'alert', NULL, NULL, NULL, NULL, NULL)
                    """) == fault)
            // A policy of what never comes would be a mistake, too.
            #expect(throws: (any Error).self) {
                try database.psql(
                    "INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES (\(topic), 'observe')",
                    user: "a_operator")
            }
        }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "0")
        for name in Self.topics {
            try database.psql("SELECT tokenkeeper.register('aa', \(Self.literal(name)))", user: "a_app")
        }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "\(Self.topics.count)")
    }

    @Test func `both queues take them, and keep them as rejected`() throws {
        let database = try TestCluster.shared.database()
        for queue in ["registration (topic, token, device_id)", "send_result (topic, token, status)"] {
            try database.psql(
                "COPY tokenkeeper.\(queue) FROM STDIN (FORMAT csv)", user: "owner", input: Self.csv.joined())
        }
        // A 200 is only counted, whatever its topic is.
        try database.psql(
            "UPDATE tokenkeeper.send_result SET status = '410', body = '{\"reason\":\"Unregistered\",\"timestamp\":1794000000123}'"
        )
        try database.psql(
            "SELECT tokenkeeper.report(' ', 'aa', 410, 'Unregistered', '1794000000123')", user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        let kept = "SELECT octet_length(topic), split_part(error, ';', 1) FROM tokenkeeper.rejected_"
        #expect(
            try database.psql(kept + "registration").split(separator: "\n").map(String.init).sorted() == Self.rejected)
        #expect(
            try database.psql(kept + "result").split(separator: "\n").map(String.init).sorted()
                == (Self.rejected + ["1|\(Self.blank(at: 1))"]).sorted())
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "\(Self.topics.count)")
        #expect(
            try database.psql("SELECT count(*), count(DISTINCT topic) FROM tokenkeeper.token")
                == "\(Self.topics.count)|\(Self.topics.count)")
    }

    @Test func `a token in the topic of a result shows in no statistics`() throws {
        let database = try TestCluster.shared.database()
        let tokens = Self.others.filter { $0.fault == Self.token }.map { Self.literal($0.name) }
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status)
            SELECT t, 'aa', s FROM unnest(ARRAY[\(tokens.joined(separator: ", "))]) AS t, unnest('{200," 200",400,500,410}'::text[]) AS s;
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).rejected == 3 * tokens.count)
        #expect(
            try database.psql(
                "SELECT topic, status, reason, results FROM tokenkeeper.result_stat ORDER BY topic, status, reason")
                    == """
                    t|200||1
                    |200||\(2 * tokens.count)
                    |400|(rejected)|\(tokens.count)
                    |410|(rejected)|\(tokens.count)
                    |500|(rejected)|\(tokens.count)
                    """)
    }

    @Test func `an attached table may have them, and they are refused wherever it is read`() throws {
        let devices = try AttachedDevices()
        for (name, fault) in Self.others {
            #expect(
                try devices.app(
                    """
                    SELECT detail FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => quote_literal(\(Self.literal(name))),
                        registered_at => 'last_seen', dry_run => true)
                    """) == "topic: \(fault)")
        }
        try devices.attach()
        let rows = (Self.others.map(\.name) + Self.topics).map { "('aa', now(), \(Self.literal($0)))" }
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, bundle_id) VALUES \(rows.joined(separator: ", "))")
        try devices.drain()
        let kept =
            "SELECT octet_length(topic), split_part(error, ';', 1) FROM tokenkeeper.rejected_registration ORDER BY 1, 2"
        #expect(try devices.database.psql(kept).split(separator: "\n").map(String.init).sorted() == Self.rejected)
        #expect(try devices.database.psql("SELECT count(*) FROM tokenkeeper.token") == "\(Self.topics.count)")
        // Once.
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        #expect(
            try devices.app("SELECT queued FROM tokenkeeper.backfill_next(\(source))")
                == "\(Self.topics.count + Self.others.count)")
        try devices.drain()
        #expect(
            try devices.database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration")
                == "\(Self.rejected.count)")
    }
}
