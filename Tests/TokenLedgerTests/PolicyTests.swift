import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Topic policy` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    @Test
    func `an observing gate answers true and shows what it would withhold; one UPDATE makes it enforce`()
        throws
    {
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('t', 'observe')
            """, user: "a_operator")
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{aa,bb,cc}'::text[]) AS t;
            SELECT tokenkeeper.unregister(t, 't') FROM unnest('{aa,dd}'::text[]) AS t;
            SELECT tokenkeeper.register('aa', 'u', registered_at => '2025-01-01Z'), tokenkeeper.unregister('aa', 'u');
            """, user: "a_app")
        let gates = """
            SELECT tokenkeeper.is_sendable('aa', 't'), tokenkeeper.is_sendable('dd', 't'), tokenkeeper.is_sendable('xx', 't'),
                   ARRAY(SELECT tokenkeeper.sendable('{aa,bb,xx,dd}', 't')), tokenkeeper.is_sendable('aa', 'u')
            """
        let views = """
            SELECT (SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.sendable_token WHERE topic = 't'),
                   (SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token WHERE topic = 't')
            """
        let shown =
            "SELECT string_agg(token || ' ' || sendable, ',' ORDER BY token) FROM tokenkeeper.token WHERE topic = 't'"
        #expect(try database.psql(gates, user: "a_sender") == "t|t|f|{aa,bb,dd}|f")
        #expect(try database.psql(views, user: "a_sender") == "aa,bb,cc|")
        #expect(try database.psql(shown, user: "a_reader") == "aa false,bb true,cc true,dd false")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-02Z')", user: "a_app") == "t",
            "it may be sent to now, says the gate")
        try database.psql("UPDATE tokenkeeper.topic_policy SET gate = 'enforce' WHERE topic = 't'", user: "a_operator")
        #expect(try database.psql(gates, user: "a_sender") == "f|f|f|{bb}|f")
        #expect(try database.psql(views, user: "a_sender") == "bb,cc|aa,dd")
        #expect(
            try database.psql(
                "SELECT environment, topic, message, done_by FROM tokenkeeper.operation WHERE operation = 'policy_changed'"
            )
                == "production|t|gate is enforce, was observe|a_operator")
    }

    @Test func `every known topic has a row, and null means the default`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't', 'sandbox')", user: "a_app")
        #expect(
            try database.psql(
                "SELECT environment, topic, gate, suppressed_retention, guard_max_share FROM tokenkeeper.topic_policy",
                user: "a_reader") == "sandbox|t|||")
    }

    @Test(arguments: [
        "gate = 'off'", "suppressed_retention = '1 minute'", "dormant_after = '1 hour'", "guard_max_share = 50",
        "guard_allowance = -1", "prune_max_share = -0.1", "prune_allowance = -1",
    ])
    func `an invalid value is refused`(_ change: String) throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        var someone = try database.connect(user: "a_operator")
        let error = #expect(throws: DatabaseError.self) {
            try someone.execute("UPDATE tokenkeeper.topic_policy SET \(change)")
        }
        #expect(error?.sqlState == "23514")
    }

    @Test func `an operator may change policies, but not topics`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        for statement in [
            "UPDATE tokenkeeper.topic_policy SET topic = 'u'", "DELETE FROM tokenkeeper.topic_policy",
        ] {
            var someone = try database.connect(user: "a_operator")
            #expect(throws: DatabaseError.self) { try someone.execute(statement) }
        }
    }

    /// - Returns: What the statement raises: its SQLSTATE, message and hint.
    private func refusal(_ statement: String) throws -> [String?] {
        var session = try database.connect(user: "a_operator")
        do {
            try session.execute(statement)
            return []
        } catch let error as DatabaseError {
            return [error.sqlState, error.message, error.hint]
        }
    }

    @Test func `an UPDATE that matches no topic warns`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')", user: "a_app")
        func warns(_ statement: String) throws -> Bool {
            try TestCluster.run(
                ["sh", "-c", "psql -XAtq -d \"$1\" -c \"$2\" 2>&1", "sh", database.url(user: "a_operator"), statement],
                input: ""
            ).contains("WARNING:  the UPDATE matches no topic")
        }
        let update = "UPDATE tokenkeeper.topic_policy SET max_per_second = 5 WHERE topic ="
        #expect(try warns("\(update) 'com.exmaple.app'"))
        #expect(try !warns("\(update) 'com.example.app'"))
        // A new topic, as the how-to adds it; and within a savepoint.
        let upsert = """
            INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('com.example.later', 'observe')
            ON CONFLICT (environment, topic) DO UPDATE SET gate = 'observe'
            """
        for _ in 1...2 { #expect(try !warns(upsert)) }
        #expect(try !warns("BEGIN; SAVEPOINT s; \(update) 'com.example.app'; COMMIT"))
        #expect(
            try database.psql(
                "SELECT topic, gate, max_per_second FROM tokenkeeper.topic_policy WHERE environment = 'production' ORDER BY topic"
            ) == "com.example.app||5\ncom.example.later|observe|")
    }

    @Test func `an unknown gate is refused, and the words are named`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')", user: "a_app")
        for statement in [
            "UPDATE tokenkeeper.topic_policy SET gate = 'obsrve' WHERE topic = 'com.example.app'",
            "INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('com.example.other', 'obsrve')",
        ] {
            #expect(
                try refusal(statement) == [
                    "23514", "gate is 'obsrve', expected 'enforce' or 'observe', or null for the default", nil,
                ])
        }
    }

    @Test func `what names a topic suggests the nearest`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')", user: "a_app")
        for call in [
            "pause_sending('com.example.ap')",
            "reinstate('com.example.ap', 'production', '2025-01-01Z', '2025-01-02Z')",
            "enqueue('{}', 'com.example.ap', everyone => true)", "audience_size('com.example.ap', everyone => true)",
        ] {
            var owner = try database.connect()
            let error = #expect(throws: DatabaseError.self) { try owner.execute("SELECT tokenkeeper.\(call)") }
            #expect(error?.message == "topic 'com.example.ap' is not known in environment 'production'", "\(call)")
            #expect(error?.hint == "Did you mean 'com.example.app'?", "\(call)")
        }
        // Its requests wait, although no device has registered.
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.apq', 'aa', '{}')",
            user: "a_sender")
        #expect(try database.psql("SELECT tokenkeeper.pause_sending('com.example.apq')", user: "a_operator") == "t")
    }

    @Test(
        arguments: [
            ("com.example.app", "com.example.app", 0), ("com.example.ap", "com.example.app", 1),
            ("xcom.example.app", "com.example.app", 1),
            ("com.exmaple.app", "com.example.app", 2), ("abcdef", "azced", 3), ("com.example.app", "org.else.app", nil),
            ("", "abc", 3),
            ("abc", "", 3), ("", "", 0),
        ] as [(String, String, Int?)])
    func `the distance of two names is the number of edits`(one: String, other: String, edits: Int?) throws {
        for (first, second) in [(one, other), (other, one)] {
            #expect(
                try database.psql("SELECT tokenkeeper.typing_distance('\(first)', '\(second)', 3)") == edits.map(
                    String.init) ?? "")
        }
    }

    @Test func `a thousand topics of one length are compared within bounds`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.topic_policy (topic) SELECT 'com.example.a' || lpad(i::text, 4, '0') FROM generate_series(1, 1000) AS i",
            user: "a_operator")
        #expect(
            try database.psql("SELECT tokenkeeper.resembled_topic('com.exmaple.a0007', 'production')")
                == "com.example.a0007")
        #expect(try database.psql("SELECT tokenkeeper.resembled_topic(repeat('a', 512), 'production') IS NULL") == "t")
    }
}
