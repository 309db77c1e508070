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
}
