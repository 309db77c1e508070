import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What a router shows of all shards, and what it does on all of them.
@Suite(.ownThread) struct `All shards through a router` {
    let shards: TestShards
    var router: TestDatabase { shards.routers[0] }

    init() throws {
        shards = try TestShards()
    }

    private func onEach(_ query: String) throws -> [String] {
        try shards.shards.map { try $0.psql(query) }
    }

    /// One token for each shard, in the order of the shards.
    private func register(_ topic: String = "t") throws -> [String] {
        try shards.shards.enumerated().map { number, shard in
            let token = try shard.psql(
                "SELECT t FROM (SELECT lpad(to_hex(i), 4, '0') FROM generate_series(1, 1000) AS i) AS s (t) WHERE tokenkeeper.shard_of(t, 4) = \(number) LIMIT 1"
            )
            try shard.psql(
                "SELECT tokenkeeper.register('\(token)', '\(topic)', device_id => 'd\(number)', user_id => 'u')")
            return token
        }
    }

    private func fails(_ statement: String, as user: String) throws -> DatabaseError {
        var connection = try router.connect(user: user)
        return try #require(throws: DatabaseError.self) { try connection.execute(statement) }
    }

    @Test func `a view has the rows of all shards with the shard's number, and a condition on it leaves one shard`()
        throws
    {
        let tokens = try register()
        #expect(
            try router.psql(
                "SELECT string_agg(token, ' ' ORDER BY shard) FROM tokenkeeper.token WHERE topic = 't'",
                user: "a_reader")
                == tokens.joined(separator: " "))
        let one =
            "shard = tokenkeeper.shard_of('\(tokens[3])', tokenkeeper.shard_count()) AND token_key = tokenkeeper.token_key('\(tokens[3])')"
        #expect(try router.psql("SELECT device_id FROM tokenkeeper.token WHERE \(one)", user: "a_reader") == "d3")
        let plan = try router.psql("EXPLAIN SELECT * FROM tokenkeeper.sendable_token WHERE \(one)", user: "a_sender")
        #expect(plan.split(separator: "\n").count == 1 && plan.contains("Foreign Scan on sendable_token"), "\(plan)")
        #expect(try fails("SELECT * FROM tokenkeeper.token", as: "a_sender").sqlState == "42501")
    }

    @Test func `views, functions and policies have the names, columns, arguments and comments of a shard`() throws {
        let columns = """
            SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod)
            FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'v'
            """
        let onRouter = try router.psql(columns, user: "postgres").split(separator: "\n")
        let onShard = Set(
            try shards.shards[0].psql(columns.replacing("= 'v'", with: "IN ('v', 'r', 'p')")).split(separator: "\n"))
        let more = onRouter.filter {
            !onShard.contains($0) && !$0.hasSuffix("|shard|integer") && !$0.hasPrefix("router|")
        }
        #expect(Set(more) == ["topic_policy|shards|integer[]", "campaign_progress|shards|integer[]"])
        let functions = """
            SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
            FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND p.proname ~ '^(forget|pause_s|resume_s|request|re|would|discard|undo_next|pruned)'
            """
        let offered = Set(try router.psql(functions, user: "postgres").split(separator: "\n"))
        let all = Set(try shards.shards[0].psql(functions).split(separator: "\n"))
        for name in [
            "forget", "forget_device", "forget_user", "pause_sending", "request_sweep", "reinstate", "requeue_failed",
        ] {
            let wanted = try #require(all.first { $0.hasPrefix("\(name)|") })
            #expect(offered.contains(wanted), "\(wanted)")
        }
        let bare = try router.psql(
            """
            SELECT c.relname FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('v', 'p') AND obj_description(c.oid, 'pg_class') IS NULL
            UNION ALL
            SELECT c.relname || '.' || a.attname FROM pg_class AS c
            JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'p' AND col_description(c.oid, a.attnum) IS NULL
            UNION ALL
            SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
            """, user: "postgres")
        #expect(bare == "")
    }

    @Test func `status adds up, and names a shard that does not answer`() throws {
        try router.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token) SELECT 't', encode(sha256(i::text::bytea), 'hex') FROM generate_series(1, 100) AS i",
            user: "a_sender")
        let query = "SELECT queue_depth, live_daemons FROM tokenkeeper.status"
        #expect(try router.psql(query, user: "a_reader") == "100|0")
        let lost = try #require(Int(try shards.shards[3].psql("SELECT count(*) FROM tokenkeeper.send_result")))
        try shards.withShardDown(3) {
            #expect(try router.psql(query, user: "a_reader") == "\(100 - lost)|0")
            let warnings = try router.psql(
                "SELECT array_to_string(critical_warnings, chr(10)) FROM tokenkeeper.status", user: "a_reader")
            #expect(warnings.hasPrefix("shard 3 does not answer: could not connect"), "\(warnings)")
            #expect(warnings.contains("shards 0, 1, 2: no daemon has ever run on this database"), "\(warnings)")
            #expect(
                try router.psql(
                    "SELECT string_agg(shard::text, ' ') FROM tokenkeeper_shard.status WHERE error IS NOT NULL",
                    user: "a_operator")
                    == "3")
        }
        #expect(try router.psql(query, user: "a_reader") == "100|0")
    }

    @Test func `a function of all shards does its work on each, and says where it failed`() throws {
        _ = try register()
        #expect(try router.psql("SELECT tokenkeeper.pause_sending('t', reason => 'a test')", user: "a_operator") == "t")
        #expect(
            try onEach("SELECT reason || ' ' || paused_by FROM tokenkeeper.paused_topic")
                == Array(repeating: "a test a_operator", count: 4))
        #expect(try router.psql("SELECT tokenkeeper.pause_sending('t')", user: "a_operator") == "f")
        _ = try router.psql("SELECT tokenkeeper.request_sweep(dry_run => true)", user: "a_operator")
        #expect(
            try router.psql(
                "SELECT count(*), count(DISTINCT shard) FROM tokenkeeper.sweep_run WHERE dry_run", user: "a_reader")
                == "4|4")
        try shards.withShardDown(3) {
            let error = try fails("SELECT tokenkeeper.resume_sending('t')", as: "a_operator")
            #expect(
                error.message.hasPrefix("resume_sending failed on shard 3, and the other shards have done it: "),
                "\(error)")
        }
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.paused_topic") == ["0", "0", "0", "1"])
        // The session whose connection to the shard was ended notices that with one more error.
        try eventually("all shards answer") {
            (try? router.psql("SELECT tokenkeeper.resume_sending('t')", user: "a_operator")) == "t"
        }
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.paused_topic") == ["0", "0", "0", "0"])
    }

    @Test func `a person is forgotten on all shards, and a malformed token is refused as on one`() throws {
        _ = try register()
        #expect(try Int(router.psql("SELECT tokenkeeper.forget_user('u')", user: "a_app")) ?? 0 >= 4)
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.ledger") == ["0", "0", "0", "0"])
        let error = try fails("SELECT tokenkeeper.forget('no token')", as: "a_app")
        #expect(error.sqlState == "22023" && error.message.contains("expected 1 to 512 bytes in hex"), "\(error)")
        #expect(try fails("SELECT tokenkeeper.pause_sending('t')", as: "a_app").sqlState == "42501")
    }

    @Test func `a topic that only one shard knows is no error, and a topic that none knows is`() throws {
        try shards.shards[1].psql("SELECT tokenkeeper.register('aa', 'rare')")
        func call(_ topic: String) -> String {
            "SELECT tokenkeeper.would_reinstate('\(topic)', 'production', now() - interval '1 day', now())"
        }
        #expect(try router.psql(call("rare"), user: "a_operator") == "0")
        #expect(try fails(call("unknown"), as: "a_operator").message.contains("is not known in environment"))
    }

    @Test func `ids of rows belong to one shard`() throws {
        #expect(try fails("SELECT tokenkeeper.requeue_failed('{1}')", as: "a_operator").sqlState == "0A000")
        #expect(try router.psql("SELECT tokenkeeper.requeue_failed()", user: "a_operator") == "0")
        #expect(try router.psql("SELECT tokenkeeper_shard.requeue_failed(2, '{1}')", user: "a_operator") == "0")
    }

    @Test func `a policy reaches all shards, in one transaction, and a limit of a whole topic is divided`() throws {
        try shards.shards[2].psql("SELECT tokenkeeper.register('aa', 't')")
        try router.psql(
            "UPDATE tokenkeeper.topic_policy SET gate = 'observe', guard_allowance = 10, max_per_second = 101",
            user: "a_operator")
        let policies = {
            try onEach(
                "SELECT gate, guard_allowance, max_per_second, confirm_share FROM tokenkeeper.topic_policy WHERE topic = 't'"
            )
        }
        #expect(try policies() == ["observe|3|26|", "observe|3|25|", "observe|2|25|", "observe|2|25|"])
        let sum = "SELECT gate, guard_allowance, max_per_second, shards FROM tokenkeeper.topic_policy"
        #expect(try router.psql(sum, user: "a_reader") == "observe|10|101|{0,1,2,3}")
        var operatorLogin = try router.connect(user: "a_operator")
        try operatorLogin.run("BEGIN")
        try operatorLogin.run("UPDATE tokenkeeper.topic_policy SET gate = NULL")
        try operatorLogin.run("ROLLBACK")
        #expect(try router.psql(sum, user: "a_reader") == "observe|10|101|{0,1,2,3}")
        try router.psql(
            "INSERT INTO tokenkeeper.topic_policy (topic, confirm_share) VALUES ('new', 0.5)", user: "a_operator")
        #expect(
            try onEach("SELECT environment, confirm_share FROM tokenkeeper.topic_policy WHERE topic = 'new'")
                == Array(repeating: "production|0.5", count: 4))
        #expect(
            try fails("INSERT INTO tokenkeeper.topic_policy (topic) VALUES ('new')", as: "a_operator").sqlState
                == "23505")
        #expect(
            try fails("UPDATE tokenkeeper.topic_policy SET max_per_second = 3", as: "a_operator").sqlState == "22023")
    }
}
