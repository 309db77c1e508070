import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// Whoever registers a token in one spelling may ask for it in another.
@Suite(.ownThread) struct `Spellings of a token` {
    let database: TestDatabase
    private let token = TokenSpellings.token

    init() throws {
        database = try TestCluster.ofErasures.database()
    }

    /// - Parameter call: `$1` is the text.
    private func answer(_ call: String, _ text: String, user: String = "a_app") throws -> String? {
        var session = try database.connect(user: user)
        return try session.query("SELECT (\(call))::text", [.text(text)]).values(String?.self).first ?? nil
    }

    @Test(arguments: TokenSpellings.all)
    func `registrations, the gate, results and forget read each spelling`(text: String) throws {
        var daemon = try database.connect(user: "a_daemon")
        #expect(try answer("tokenkeeper.register($1, 't', registered_at => '2025-01-01Z')", text) == "true")
        #expect(try answer("tokenkeeper.tag('t', token => $1, add => '{x}')", text) == "1")
        #expect(
            try answer(
                "SELECT array_agg(s) = ARRAY[$1] FROM tokenkeeper.sendable(ARRAY[$1], 't') AS s", text, user: "a_sender"
            )
                == "true", "in the spelling given")
        #expect(try answer("tokenkeeper.unregister($1, 't', at => '2025-01-02Z')", text) == "1")
        #expect(try answer("tokenkeeper.is_sendable($1, 't')", text, user: "a_sender") == "false")
        #expect(try answer("SELECT count(*) FROM tokenkeeper.sendable(ARRAY[$1], 't')", text, user: "a_sender") == "0")
        #expect(
            try answer(
                "tokenkeeper.register(ARRAY[ROW($1, 't', NULL, '2025-01-03Z', NULL, NULL, NULL, NULL)]::tokenkeeper.new_registration[])",
                text)
                == "{t}")
        _ = try answer(
            "tokenkeeper.report('t', $1, 410, 'Unregistered', '2025-01-04Z'::timestamptz, sent_at => '2025-01-05Z')",
            text, user: "a_sender")
        #expect(try drainAll(&daemon).rejected == 0)
        #expect(try database.psql("SELECT token, state, tags FROM tokenkeeper.token") == "\(token)|stale|{x}")
        #expect(try answer("tokenkeeper.forget($1) > 0", text) == "true")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0")
    }

    @Test(arguments: TokenSpellings.all)
    func `requests and campaigns read each spelling`(text: String) throws {
        let topic = "com.example.app"
        try database.psql("SELECT tokenkeeper.register('\(token)', '\(topic)')", user: "a_app")
        var sender = try database.connect(user: "a_sender")
        _ = try sender.query(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(topic)', $1, '{}')", [.text(text)])
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        let scope = TopicScope(environment: "production", topic: topic)
        let claim = try outbox.claim(scope, most: 10, backgroundPerHour: 3, on: &daemon)
        #expect(claim.requests.map(\.request.address.token.hex) == [token])
        #expect(
            try answer("tokenkeeper.enqueue('{}', '\(topic)', tokens => ARRAY[$1, '\(token)'])", text, user: "a_sender")
                == "1")
        #expect(try database.psql("SELECT token FROM tokenkeeper.campaign_token") == token)
    }

    @Test func `what was queued in another spelling is forgotten, too`() throws {
        var sender = try database.connect(user: "a_sender")
        var app = try database.connect(user: "a_app")
        for text in TokenSpellings.all {
            // Of these, a claim sees only the due ones.
            for (topic, due) in [("due", "now()"), ("later", "now() + interval '1 day'")] {
                _ = try sender.query(
                    "INSERT INTO tokenkeeper.send_request (topic, token, payload, scheduled_at) VALUES ('\(topic)', $1, '{}', \(due))",
                    [.text(text)])
            }
            _ = try app.query("INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', $1)", [.text(text)])
        }
        try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app")
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        let claim = try outbox.claim(
            TopicScope(environment: "production", topic: "due"), most: 100, backgroundPerHour: 3, on: &daemon)
        #expect(claim.requests == [])
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_request WHERE topic = 'due'") == "0")
        try drainAll(&daemon)
        try database.finishErasures()
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_request") == "0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0")
    }

    // What cannot be read ----------------------------------------------------------------------------------------------

    private func notices(_ sql: String, user: String = "a_sender") throws -> [String] {
        try TestCluster.run(
            ["sh", "-c", "psql -XAtq -d \"$1\" -c \"$2\" 2>&1 || true", "sh", database.url(user: user), sql], input: ""
        ).split(separator: "\n").map(String.init).filter { $0.contains("NOTICE") || $0.contains("ERROR") }
    }

    @Test func `a token that cannot be read is a NOTICE with a count, and shows eight characters`() throws {
        let expo = String(repeating: "z", count: 64)
        let why = "token is 'zzzzzzzz'... (64 characters), expected 1 to 512 bytes in hex"
        #expect(try notices("SELECT tokenkeeper.is_sendable('\(expo)', 't')") == ["NOTICE:  not sendable: \(why)"])
        let fault = try database.psql("SELECT tokenkeeper.environment_fault('prod')")
        for call in ["is_sendable('aa', 't', 'prod')", "sendable('{aa}', 't', 'prod')"] {
            #expect(try notices("SELECT tokenkeeper.\(call)") == ["NOTICE:  \(fault)"])
        }
        #expect(
            try notices("SELECT tokenkeeper.sendable('{aa,NULL,\(expo),bb,c}', 't')")
                == ["NOTICE:  not sendable: 2 of 5 tokens cannot be read, such as number 3: \(why)"])
        #expect(try notices("SELECT tokenkeeper.is_sendable(NULL, 't'), tokenkeeper.sendable('{aa,NULL}', 't')") == [])
        #expect(
            try notices("SELECT tokenkeeper.report('t', '\(expo)', 200)") == [
                "NOTICE:  the result will be rejected: \(why)"
            ])
        let rest = "200, NULL, NULL, NULL, NULL, NULL"
        #expect(
            try notices(
                "SELECT tokenkeeper.report(ARRAY[ROW('t', '\(expo)', \(rest)), ROW('t', 'aa', \(rest))]::tokenkeeper.new_result[])"
            )
                == ["NOTICE:  some results will be rejected: 1 of 2 tokens cannot be read, such as number 1: \(why)"])
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "3", "it is queued all the same")
    }

    @Test func `a token of a campaign that cannot be read refuses the call, with a count`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')", user: "a_app")
        let many = try notices(
            """
            BEGIN; SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{}');
            INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (1, 'aa'), (1, 'zz'), (1, 'z'), (1, NULL)
            """)
        #expect(
            many.last
                == "ERROR:  2 of 4 tokens cannot be read, such as number 2: token is 'zz' (2 characters), expected 1 to 512 bytes in hex"
        )
    }
}
