import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// INSERT and COPY into the queues of a router.
@Suite(.ownThread) struct `The queues of a router` {
    let shards: TestShards
    var router: TestDatabase { shards.routers[0] }

    init() throws {
        shards = try TestShards()
    }

    /// What a query finds on each shard.
    private func onEach(_ query: String) throws -> [String] {
        try shards.shards.map { try $0.psql(query) }
    }

    private static let token = "encode(sha256(i::text::bytea), 'hex')"

    @Test(arguments: ["send_result", "registration", "send_request"])
    func `each row is on the shard of its token, and a row without one on shard 0`(queue: String) throws {
        let user = queue == "registration" ? "a_app" : "a_sender"
        try router.psql(
            """
            INSERT INTO tokenkeeper.\(queue) (topic, token)
            SELECT 't', CASE i % 10 WHEN 0 THEN NULL WHEN 1 THEN 'no token' ELSE upper(\(Self.token)) END FROM generate_series(1, 200) AS i
            """, user: user)
        try shards.routers[1].psql(
            "COPY tokenkeeper.\(queue) (topic, token) FROM STDIN", user: user,
            input: (1...20).map { "t\t\(String(repeating: "0\($0 % 10)", count: 32))\n" }.joined())
        let astray = try shards.shards.enumerated().map { number, shard in
            try shard.psql(
                "SELECT count(*) FROM tokenkeeper.\(queue) WHERE tokenkeeper.shard_of(token, 4) <> \(number)")
        }
        #expect(astray == ["0", "0", "0", "0"])
        let counts = try onEach("SELECT count(*) FROM tokenkeeper.\(queue)").compactMap { Int($0) }
        #expect(counts.reduce(0, +) == 220 && counts[0] > 40 && counts.allSatisfy { $0 > 20 }, "\(counts)")
        // The defaults of a shard apply to the columns that a router does not have.
        #expect(
            try onEach("SELECT count(*) FROM tokenkeeper.\(queue) WHERE queued_at IS NULL OR environment IS NULL") == [
                "0", "0", "0", "0",
            ])
    }

    @Test func `every column arrives`() throws {
        try router.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
            VALUES ('sandbox', 't', 'aa', '410', '{}', 'id', '2026-01-01Z')
            """, user: "a_sender")
        try router.psql(
            """
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id)
            VALUES ('sandbox', 't', 'aa', '2026-01-01Z', 'd', 'u', '{x,NULL}', true, 7)
            """, user: "a_app")
        try router.psql(
            """
            INSERT INTO tokenkeeper.send_request
                (environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id)
            VALUES ('sandbox', 't', 'aa', '{"a": 1}', 'alert', 5, 'infinity', 'c', '2030-01-01Z', '00000000-0000-0000-0000-000000000001')
            """, user: "a_sender")
        let shard = try shards.shard(of: "aa")
        #expect(
            try shard.psql(
                "SELECT environment, topic, token, status, body, apns_id, extract(epoch FROM sent_at)::bigint FROM tokenkeeper.send_result"
            )
                == "sandbox|t|aa|410|{}|id|1767225600")
        #expect(
            try shard.psql(
                """
                SELECT environment, topic, token, extract(epoch FROM registered_at)::bigint, device_id, user_id, tags, unregistered, source_id
                FROM tokenkeeper.registration
                """) == "sandbox|t|aa|1767225600|d|u|{x,NULL}|t|7")
        #expect(
            try shard.psql(
                """
                SELECT environment, topic, token, payload, push_type, priority, expiration, collapse_id, extract(epoch FROM scheduled_at)::bigint, apns_id
                FROM tokenkeeper.send_request
                """) == #"sandbox|t|aa|{"a": 1}|alert|5|infinity|c|1893456000|00000000-0000-0000-0000-000000000001"#)
    }

    @Test func `what is committed on some shards only, and then repeated through another router, is pushed once`()
        throws
    {
        var wereCommitted = 0
        // The order in which the shards commit is not ours to choose: each of them fails once.
        for (number, broken) in shards.shards.enumerated() {
            try broken.psql(
                """
                CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'the disk is full'; END $$;
                CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON tokenkeeper.send_request DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION public.refuse()
                """)
            let insert = """
                INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id)
                SELECT 't', \(Self.token), '{"aps":{}}', lpad(i::text, 32, '0')::uuid FROM generate_series(\(number)00, \(number)99) AS i
                """
            let failure = try #require(throws: TestFailure.self) { try router.psql(insert, user: "a_sender") }
            #expect(failure.description.contains("the disk is full"), "\(failure)")
            let count = "SELECT count(*) FROM tokenkeeper.send_request"
            #expect(try broken.psql(count) == "0")
            let partly = try onEach(count).compactMap { Int($0) }.reduce(0, +)
            wereCommitted += partly
            // What a daemon has claimed is gone from the queue when the repetition comes.
            let taken = shards.shards[(number + 1) % 4]
            let pushed =
                Int(
                    try taken.psql(
                        "WITH d AS (DELETE FROM tokenkeeper.send_request RETURNING 1) SELECT count(*) FROM d")) ?? 0
            try broken.psql("DROP TRIGGER refuse ON tokenkeeper.send_request; DROP FUNCTION public.refuse()")
            for router in shards.routers { try router.psql(insert, user: "a_sender") }
            let queued = try onEach("SELECT count(*) || ' ' || count(DISTINCT apns_id) FROM tokenkeeper.send_request")
                .map { $0.split(separator: " ").compactMap { Int($0) } }
            #expect(pushed + queued.map(\.[0]).reduce(0, +) == 100, "\(number): \(pushed) and \(queued)")
            #expect(queued.allSatisfy { $0[0] == $0[1] })
            for shard in shards.shards { try shard.psql("DELETE FROM tokenkeeper.send_request") }
        }
        #expect(wereCommitted > 0, "no INSERT was committed in part")
    }

    @Test func `a transaction that is rolled back leaves nothing on any shard`() throws {
        var sender = try router.connect(user: "a_sender")
        try sender.run("BEGIN")
        try sender.run(
            "INSERT INTO tokenkeeper.send_result (topic, token) SELECT 't', \(Self.token) FROM generate_series(1, 50) AS i"
        )
        try sender.run("ROLLBACK")
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.send_result") == ["0", "0", "0", "0"])
    }

    @Test func `what a login may insert is up to the shards`() throws {
        // On the router it may insert, on the shards it may not.
        try router.psql("GRANT INSERT ON tokenkeeper.send_result TO a_reader", user: "postgres")
        #expect(throws: (any Error).self) {
            try router.psql("INSERT INTO tokenkeeper.send_result (topic, token) VALUES ('t', 'aa')", user: "a_reader")
        }
    }
}
