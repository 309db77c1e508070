import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What people do with campaigns.
@Suite(.ownThread) struct `A campaign` {
    private func addressed(_ stage: CampaignStage, _ arguments: String) throws -> Set<Int> {
        let campaign = try stage.enqueue(arguments)
        try stage.addressAll(campaign)
        return Set(try stage.claim(campaign).values)
    }

    // The audience -----------------------------------------------------------------------------------------------------

    @Test func `an audience is the sendable tokens that were meant, and audience_size counts them`() throws {
        let stage = try CampaignStage(tokens: 40)
        try stage.suppress(7)
        try stage.database.psql(
            "SELECT tokenkeeper.register('ffff', 'com.example.other', tags => '{World}'), tokenkeeper.register('eeee', 'com.example.app', 'sandbox', tags => '{World}')"
        )
        // It was never registered.
        try stage.database.psql(
            "UPDATE tokenkeeper.ledger SET registered_at = DEFAULT WHERE token_key = tokenkeeper.token_key('\(CampaignStage.token(8))')"
        )
        let audiences: [(String, Set<Int>)] = [
            ("everyone => true", Set(1...40).subtracting([7, 8])),
            ("tags => 'World'", Set(1...40).subtracting([7, 8])),
            ("tags => 'World && !n:3'", Set(1...40).subtracting([3, 7, 8])),
            ("tags => 'n:1 || (n:2 && World) || n:7'", [1, 2]), ("tags => '!World'", []),
            ("device_id => 'd5'", [5]), ("device_id => 'd7'", []), ("device_id => 'nobody'", []),
            ("user_id => 'u3'", [3, 13, 23, 33]),
            ("tokens => '{\(CampaignStage.token(9)),\(CampaignStage.token(7)),ABCD,abcd}'", [9, 0xabcd]),
        ]
        for (arguments, expected) in audiences {
            #expect(try addressed(stage, arguments) == expected, "\(arguments)")
            #expect(
                try stage.database.psql(
                    "SELECT tokenkeeper.audience_size('com.example.app', \(arguments))", user: "a_sender")
                    == "\(expected.count)", "\(arguments)")
        }
        try stage.database.psql("UPDATE tokenkeeper.topic_policy SET gate = 'observe'", user: "a_operator")
        #expect(try addressed(stage, "everyone => true") == Set(1...40).subtracting([8]), "the gate only observes")
        #expect(try addressed(stage, "tokens => '{\(CampaignStage.token(7))}'") == [7])
    }

    @Test func `a wide audience is addressed in parts, each token once, whatever changes meanwhile`() throws {
        let stage = try CampaignStage(tokens: 12_000)
        let campaign = try stage.enqueue()
        #expect(try stage.due() == "\(campaign)|f|t")
        #expect(try stage.address(campaign) == 1000, "a short first part")
        #expect(try stage.count("campaign_batch", "batch = 1 AND requests = 50") == 1, "and a short first batch")
        #expect(try stage.address(campaign, ahead: 500) == nil, "enough waits")
        // Rolled back, as by a crash.
        try stage.database.psql(
            "BEGIN; SELECT tokenkeeper.address_campaign(\(campaign), 5000); ROLLBACK", user: "a_daemon")
        // One before the place that was reached, one after it; one goes.
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.ledger (registered_at, topic_id, token_key)
            SELECT now(), 1, tokenkeeper.token_key(t) FROM unnest(ARRAY['\(CampaignStage.token(3))ff', '\(CampaignStage.token(5000))ff']) AS t
            """)
        try stage.suppress(6000)
        try stage.addressAll(campaign)
        var claimed: [Int] = []
        while true {
            let more = try stage.claim(campaign)
            if more.isEmpty { break }
            claimed += more.values
        }
        #expect(claimed.count == 12_000 && Set(claimed).count == 12_000)
        #expect(!claimed.contains(6000))
        #expect(try stage.progress(campaign) == "12000|12000|0|0|0|0|0|0|0")
        #expect(try stage.due() == "", "nothing is to be done")
    }

    @Test(arguments: [false, true])
    func `a few of many are found by the index on tags alone, with or without statistics`(isAnalyzed: Bool) throws {
        let stage = try CampaignStage()
        try stage.database.psql("ALTER TABLE tokenkeeper.ledger SET (autovacuum_enabled = off)")
        try stage.register(1...3000)
        if isAnalyzed { try stage.database.psql("ANALYZE tokenkeeper.ledger") }
        let campaign = try stage.enqueue("tags => 'n:1 || n:2 && !Mars'")
        // The session may not have reported earlier transactions yet: only the difference counts.
        let scans =
            "SELECT pg_stat_get_xact_numscans('tokenkeeper.ledger_tags'::regclass), "
            + "pg_stat_get_xact_numscans('tokenkeeper.ledger_pkey'::regclass)"
        let lines = try stage.database.psql(
            "BEGIN; \(scans); SELECT tokenkeeper.address_campaign(\(campaign), 100); \(scans); COMMIT")
        #expect(lines == "0|0\n2\n1|0")
    }

    @Test func `of very many campaigns, some are due at a time, and each has its turn`() throws {
        let stage = try CampaignStage(tokens: 2)
        // All of one transaction would be due at the same instant.
        try stage.database.psql(
            "DO $$ BEGIN FOR i IN 1..600 LOOP PERFORM tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', '\(CampaignStage.topic)', tokens => ARRAY['aa']); COMMIT; END LOOP; END $$",
            user: "a_sender")
        func due(_ condition: String) throws -> Set<Int> {
            Set(
                try stage.database.psql(
                    "SELECT campaign_id FROM tokenkeeper.campaigns_due() WHERE \(condition)", user: "a_daemon"
                ).split(separator: "\n").compactMap { Int($0) })
        }
        // Those that cannot go on are never addressed. Half of the others are.
        try stage.database.psql(
            "SELECT sum(tokenkeeper.address_campaign(i, 100)) FROM generate_series(201, 400) AS i",
            user: "a_daemon")
        for kind in ["needs_addressing", "has_batches"] {
            let all = Set(kind == "has_batches" ? Array(201...400) : Array(1...200) + Array(401...600))
            let first = try due(kind)
            #expect(first.isSubset(of: all) && (100...220).contains(first.count))
            if kind == "needs_addressing" { #expect(first.contains(600), "the newest is seen at once") }
            var seen = first
            for _ in 0..<1000 where seen != all { seen.formUnion(try due(kind)) }
            #expect(seen == all)
        }
        #expect(try due("true").count <= 410)
    }

    @Test func `very many campaigns that are scheduled or paused cost nothing while they wait`() throws {
        let stage = try CampaignStage(tokens: 1)
        let due = try stage.enqueue("everyone => true, expiration => clock_timestamp() + interval '1 hour'")
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.campaign (environment, topic, payload, push_type, audience_kind, audience, content_hash, state, scheduled_at, expiration)
            SELECT 'production', '\(CampaignStage.topic)', '{}', 'alert', 'user', 'u' || i, '', CASE WHEN i % 2 = 0 THEN 'waiting' ELSE 'paused' END,
                   now() + interval '1 day', now() + interval '2 days'
            FROM generate_series(1, 5000) AS i;
            ANALYZE tokenkeeper.campaign
            """)
        let read = try stage.database.psql(
            """
            BEGIN;
            SELECT count(*) FROM tokenkeeper.end_campaigns();
            SELECT sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) < 500 FROM pg_index AS i WHERE i.indrelid = 'tokenkeeper.campaign'::regclass;
            COMMIT
            """, user: "postgres")
        #expect(read == "0\nt", "end_campaigns does not read them")
        let asked = try stage.database.psql(
            """
            SET track_functions = 'all';
            BEGIN;
            SELECT campaign_id FROM tokenkeeper.campaign_wait WHERE needs_help;
            SELECT pg_stat_get_xact_function_calls('tokenkeeper.sending_fault(text, text)'::regprocedure) < 10;
            COMMIT
            """, user: "postgres")
        #expect(asked == "\(due)\nt", "nobody looks for a daemon that could send them")
        try stage.database.psql(
            "UPDATE tokenkeeper.campaign SET scheduled_at = now() - interval '2 days', expiration = now() - interval '1 day' WHERE scheduled_at IS NOT NULL"
        )
        while try stage.database.psql("SELECT count(*) > 1 FROM tokenkeeper.campaign WHERE ended_at IS NULL") == "t" {
            try stage.end()
        }
    }

    @Test(arguments: ["a pause", "a rate"])
    func `hundreds of campaigns that cannot go on crowd out no other`(obstacle: String) throws {
        let stage = try CampaignStage(tokens: 2)
        // From the same list of tokens. The campaigns 101 and 401 are of the other topic.
        try stage.database.psql("SELECT tokenkeeper.ensure_topic('production', 'crowded')")
        try stage.database.psql(
            """
            DO $$ BEGIN FOR i IN 1..500 LOOP
                PERFORM tokenkeeper.enqueue('\(CampaignStage.alert)', CASE WHEN i IN (101, 401) THEN '\(CampaignStage.topic)' ELSE 'crowded' END, tokens => '{aa}');
            COMMIT; END LOOP; END $$
            """, user: "a_sender")
        let addressed = obstacle == "a pause" ? 300 : 500
        try stage.database.psql(
            "SELECT sum(tokenkeeper.address_campaign(i, 100)) FROM generate_series(1, \(addressed)) AS i",
            user: "a_daemon")
        if obstacle == "a pause" {
            try stage.database.psql("SELECT tokenkeeper.pause_sending('crowded')", user: "a_operator")
        } else {
            try stage.database.psql(
                """
                UPDATE tokenkeeper.topic SET max_per_second = 1 WHERE topic = 'crowded';
                INSERT INTO tokenkeeper.topic_rate SELECT topic_id, now() + interval '1 hour' FROM tokenkeeper.topic WHERE topic = 'crowded'
                """)
        }
        for _ in 1...10 {
            let claimable = try stage.database.psql(
                "SELECT campaign_id FROM tokenkeeper.campaigns_due() WHERE due_at <= now() AND topic = '\(CampaignStage.topic)'",
                user: "a_daemon")
            #expect(claimable == "101\n401")
            let others = try stage.database.psql(
                "SELECT count(*) FROM tokenkeeper.campaigns_due() WHERE topic = 'crowded'", user: "a_daemon")
            #expect((obstacle == "a pause" ? 0...0 : 100...200).contains(Int(others) ?? -1))
        }
    }

    @Test func `a patient worker reads few tokens at a time, and sees that there are more`() throws {
        let stage = try CampaignStage(tokens: 2500)
        try stage.database.psql(
            "UPDATE tokenkeeper.ledger SET tags = '{Mars}' WHERE token_key > tokenkeeper.token_key('\(CampaignStage.token(2200))')"
        )
        let campaign = try stage.enqueue("tags => 'Mars'")
        let inRanges = ", patiently => true, in_ranges => true"
        var parts: [Int?] = []
        for _ in 1...4 { parts.append(try stage.address(campaign, inRanges)) }
        #expect(parts == [0, 0, 300, nil])
        let list = try stage.enqueue(
            "tokens => ARRAY(SELECT lpad(to_hex(i), 64, '0') FROM generate_series(1, 1500) AS i)")
        #expect(
            try stage.address(list, ", patiently => true") == 1000 && stage.address(list, ", patiently => true") == 500)
    }

    @Test func `how many a campaign expects follows from how many tokens have its tags`() throws {
        let stage = try CampaignStage(tokens: 3000)
        try stage.database.psql(
            """
            UPDATE tokenkeeper.ledger SET tags = CASE WHEN get_byte(token_key, 31) < 4 THEN '{news,rare}'::text[]
                                                      WHEN get_byte(token_key, 31) % 4 = 0 THEN '{news}' END;
            ANALYZE tokenkeeper.ledger
            """)
        let audiences = [
            ("news", 700...850), ("rare", 30...60), ("news && !rare", 650...800), ("nobody", 0...30),
        ]
        for (tags, expected) in audiences {
            let campaign = try stage.enqueue("tags => '\(tags)'")
            _ = try stage.address(campaign, ", patiently => true, in_ranges => true")
            let estimate = try stage.database.psql(
                "SELECT expected FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)")
            #expect(expected.contains(Int(estimate) ?? -1), "\(tags): \(estimate)")
        }
    }

    @Test func `of very many batches, a cancellation ends some, and the daemons the rest`() throws {
        let stage = try CampaignStage(tokens: 2300)
        let campaign = try stage.enqueue("everyone => true, max_per_second => 20")
        try stage.addressAll(campaign)
        #expect(try stage.count("campaign_batch") == 2300)
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        #expect(try stage.progress(campaign) == "2300|1300|0|0|0|0|0|1000|0")
        #expect(try stage.count("operation", "operation = 'campaign_cancelled' AND rows = 2300") == 1)
        #expect(try stage.claim(campaign).isEmpty && stage.due() == "", "nothing more is sent")
        try stage.end()
        #expect(try stage.progress(campaign) == "2300|300|0|0|0|0|0|2000|0")
        try stage.end()
        #expect(try stage.progress(campaign) == "2300|0|0|0|0|0|0|2300|0")
        #expect(try stage.count("campaign", "ended_at IS NOT NULL AND state = 'cancelled'") == 1)
    }

    @Test func `the list of a campaign that has expired goes with it`() throws {
        let stage = try CampaignStage(tokens: 1)
        let campaign = try stage.enqueue("tokens => '{aa,bb}', expiration => clock_timestamp() + interval '1 hour'")
        try stage.database.psql(
            "UPDATE tokenkeeper.campaign SET expiration = now() - interval '1 hour'; SELECT tokenkeeper.end_campaigns()"
        )
        #expect(try stage.state(campaign) == "ended" && stage.count("campaign_token") == 2)
        for _ in 1...2 {
            try stage.database.psql(
                "SELECT tokenkeeper.delete_campaigns(now() + interval '1 day', 10)", user: "a_daemon")
        }
        #expect(try stage.count("campaign_token") == 0 && stage.count("campaign") == 0)
    }

    @Test func `two daemons that address at once do it once`() throws {
        let stage = try CampaignStage(tokens: 3000)
        let campaign = try stage.enqueue()
        let failures = Failures()
        atOnce(3) { _ in
            do {
                for _ in 0..<10 { try stage.address(campaign, ahead: 100_000) }
            } catch { failures.add("\(error)") }
        }
        #expect(failures.all == [])
        try stage.addressAll(campaign)
        #expect(try stage.count("campaign", "addressed = 3000") == 1)
        #expect(
            try stage.database.psql(
                "SELECT count(*), count(DISTINCT k) FROM tokenkeeper.campaign_batch AS b, unnest(b.token_keys) AS k")
                == "3000|3000")
    }

    @Test func `a list is copied in the transaction that creates the campaign, and in no other`() throws {
        let stage = try CampaignStage(tokens: 1)
        let list = (1...11_000).map { "\(1 + ($0 - 1) / 11_000)\t\(CampaignStage.token($0))" }.joined(separator: "\n")
        _ = try TestCluster.run(
            ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", stage.database.url(user: "a_sender")],
            input: """
                BEGIN;
                SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{}');
                COPY tokenkeeper.campaign_token (campaign_id, token) FROM STDIN;
                \(list)
                1\t\(CampaignStage.token(1).uppercased())
                \\.
                SAVEPOINT s;
                INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (1, 'abcd');
                COMMIT;
                """)
        for statement in [
            "INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (1, 'ab')",
            "INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (2, 'ab')",
            "BEGIN; SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{}'); INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (2, 'xy')",
        ] {
            #expect(throws: TestFailure.self, "\(statement)") { try stage.database.psql(statement, user: "a_sender") }
        }
        try stage.addressAll(1)
        #expect(try stage.progress(1) == "11001|11001|0|0|0|0|0|0|0")
        #expect(try stage.count("campaign_token") == 0)
    }

    /// PostgreSQL's message of a broken CHECK shows the row, and the server logs it.
    @Test func `a malformed token of a list gets into no log`() throws {
        let stage = try CampaignStage(tokens: 1)
        let token = "c0ffee" + String(repeating: "5ec2e7", count: 10)
        for malformed in [token + "a", "<\(token)>", String(repeating: token, count: 40), "\(token) "] {
            #expect(throws: TestFailure.self) {
                try TestCluster.run(
                    ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", stage.database.url(user: "a_sender")],
                    input: """
                        BEGIN;
                        SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{}') AS id \\gset
                        COPY tokenkeeper.campaign_token (campaign_id, token) FROM STDIN;
                        1\t\(CampaignStage.token(1))
                        1\t\(malformed)
                        \\.
                        COMMIT;
                        """)
            }
        }
        #expect(try stage.count("campaign_token") == 0)
        let log = try String(contentsOfFile: TestCluster.shared.folder + "/log", encoding: .utf8)
        #expect(log.contains("token") && !log.contains("5ec2e75ec2e7"))
    }

    /// - Returns: What the transaction prints; its error if it fails.
    private func copying(_ tokens: [String], _ arguments: String, on stage: CampaignStage) -> String {
        do {
            return try TestCluster.run(
                ["psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", stage.database.url(user: "a_sender")],
                input: """
                    BEGIN;
                    SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{}'\(arguments)) AS id \\gset
                    \\echo :id
                    CREATE TEMPORARY TABLE list (token text);
                    COPY list FROM STDIN;
                    \(tokens.joined(separator: "\n"))
                    \\.
                    INSERT INTO tokenkeeper.campaign_token (campaign_id, token) SELECT :id, token FROM list;
                    COMMIT;
                    """
            ).trimmingCharacters(in: .whitespacesAndNewlines)
        } catch { return "\(error)" }
    }

    @Test func `a list that is copied again with its idempotency_key is the same campaign`() throws {
        let stage = try CampaignStage(tokens: 1)
        let key = ", idempotency_key => 'k'"
        #expect(copying(["aa", "bb", "cc"], key, on: stage) == "1")
        #expect(copying(["cc", "AA", "bb", "bb"], key, on: stage) == "1", "before it is addressed")
        #expect(try stage.count("campaign_token") == 3 && stage.count("campaign_list") == 0)
        try stage.addressAll(1)
        #expect(copying(["aa", "bb", "cc"], key, on: stage) == "1", "afterwards")
        #expect(try stage.enqueue("tokens => '{}', idempotency_key => 'k'", payload: "{}") == 1, "without a list")
        for other in [["aa", "bb"], ["aa", "bb", "cc", "dd"], ["aa", "bb", "ee"]] {
            #expect(copying(other, key, on: stage).contains("belongs to campaign 1, which has another list of tokens"))
        }
        #expect(copying(["aa"], "", on: stage) == "2", "without a key, it is another campaign")
        for other in ["(2, 'aa')", "(1, 'aa'), (2, 'aa')"] {
            #expect(throws: TestFailure.self, "no key") {
                try stage.database.psql(
                    "INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES \(other)", user: "a_sender")
            }
        }
        #expect(throws: TestFailure.self, "of another role") {
            try stage.database.psql(
                "INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (1, 'aa'), (1, 'bb'), (1, 'cc')",
                user: "owner")
        }
        #expect(try stage.progress(1) == "3|3|0|0|0|0|0|0|0" && stage.count("campaign_list") == 0)
        #expect(try stage.count("campaign_token") == 1)
        #expect(
            try stage.database.psql("SELECT expected FROM tokenkeeper.campaign_progress ORDER BY campaign_id") == "3\n1"
        )
    }

    @Test func `a list that is copied needs the confirmation of a wide audience`() throws {
        let stage = try CampaignStage(tokens: 100)
        try stage.database.psql("UPDATE tokenkeeper.topic_policy SET confirm_share = 0.6", user: "a_operator")
        func tokens(_ range: ClosedRange<Int>) -> [String] { range.map { CampaignStage.token($0) } }
        #expect(copying(tokens(1...60) + tokens(1...60), "", on: stage) == "1", "each counts once")
        #expect(
            copying(tokens(1...61), "", on: stage).contains(
                "the audience is about 61 % of the tokens of com.example.app (production), and more than 60 % need confirm => true"
            ))
        #expect(copying(tokens(1...61), ", confirm => true", on: stage) == "3")
        #expect(try stage.count("campaign") == 2 && stage.count("campaign_token") == 181)
        // With what is given to enqueue.
        #expect(throws: TestFailure.self) {
            try stage.database.psql(
                """
                BEGIN;
                SELECT tokenkeeper.enqueue('{}', 'com.example.app', tokens => '{\(tokens(1...59).joined(separator: ","))}');
                INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (4, 'aa'), (4, 'bb');
                COMMIT
                """, user: "a_sender")
        }
    }

    @Test(arguments: [
        ("tokens => '{aa,AA,bb}'", "2", "2"), ("device_id => 'd3'", "", "1"), ("user_id => 'u4'", "", "2"),
        ("user_id => 'nobody'", "", "0"),
        ("tags => 'n:1 || n:2 || n:3'", "", "3"),
    ])
    func `expected is the size of its audience`(audience: String, before: String, after: String) throws {
        let stage = try CampaignStage(tokens: 20)
        let campaign = try stage.enqueue(audience)
        func expected() throws -> String {
            try stage.database.psql("SELECT expected FROM tokenkeeper.campaign_progress", user: "a_sender")
        }
        #expect(try expected() == before)
        try stage.addressAll(campaign)
        #expect(try expected() == after)
    }

    @Test func `scheduled_at delays it`() throws {
        let stage = try CampaignStage(tokens: 3)
        let campaign = try stage.enqueue("everyone => true, scheduled_at => clock_timestamp() + interval '1 hour'")
        #expect(try stage.due() == "")
        #expect(try stage.address(campaign) == nil)
        #expect(try stage.state(campaign) == "waiting")
        try stage.database.psql("UPDATE tokenkeeper.campaign SET scheduled_at = now()")
        #expect(try stage.due() == "\(campaign)|f|t")
        #expect(try stage.address(campaign) == 3)
    }

    // Idempotency ------------------------------------------------------------------------------------------------------

    @Test func `the same key and content is the same campaign, and another content is an error`() throws {
        let stage = try CampaignStage(tokens: 1)
        let first = try stage.enqueue("tokens => '{AA,bb}', idempotency_key => 'k', name => 'one'")
        #expect(
            try stage.enqueue(
                "tokens => '{bb,aa,bb}', idempotency_key => 'k', name => 'two'",
                payload: #"{ "aps" : {"alert":"Hello"}}"#) == first)
        for other in [
            "tokens => '{aa}', idempotency_key => 'k'", "everyone => true, idempotency_key => 'k'",
            "tokens => '{aa,bb}', idempotency_key => 'k', priority => 5", "tags => 'x', idempotency_key => 'k'",
            "tokens => '{aa,bb}', idempotency_key => 'k', max_per_second => 5",
            "tokens => '{aa,bb}', idempotency_key => 'k', scheduled_at => '2040-01-01Z'",
        ] {
            let failure = #expect(throws: TestFailure.self, "\(other)") { try stage.enqueue(other) }
            #expect(failure?.description.contains("belongs to campaign \(first)") == true)
        }
        #expect(
            try stage.enqueue("tokens => '{AA,bb}', idempotency_key => 'k'", user: "owner") != first,
            "a key of another role")
    }

    @Test func `a key that several sessions use at once makes one campaign`() throws {
        let stage = try CampaignStage(tokens: 1)
        let failures = Failures()
        let ids = Failures()
        atOnce(8) { _ in
            do { ids.add("\(try stage.enqueue("everyone => true, idempotency_key => 'k'"))") } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [] && Set(ids.all).count == 1 && ids.all.count == 8)
        #expect(try stage.count("campaign") == 1)
    }

    @Test func `a sequence of ids that is behind keeps nobody from a campaign`() throws {
        let stage = try CampaignStage(tokens: 1)
        for _ in 1...3 { try stage.enqueue() }
        // As in a database that logical replication has filled: it does not replicate sequences.
        try stage.database.psql(
            "SELECT setval('tokenkeeper.campaign_campaign_id_seq', 1, false)", user: "postgres")
        #expect(try stage.enqueue() == 4)
        #expect(try stage.enqueue("everyone => true, idempotency_key => 'k'") == 5)
        #expect(try stage.enqueue("everyone => true, idempotency_key => 'k'") == 5)
    }

    /// Enqueues a campaign in a real `psql`.
    ///
    /// - Returns: Its output and what it was told.
    private func notices(_ stage: CampaignStage, _ arguments: String, topic: String = CampaignStage.topic) throws
        -> String
    {
        try TestCluster.run(
            [
                "sh", "-c", "psql -XAtq -d \"$1\" -c \"$2\" 2>&1", "sh", stage.database.url(user: "a_sender"),
                "SELECT tokenkeeper.enqueue('{}', '\(topic)', \(arguments))",
            ],
            input: "")
    }

    @Test(arguments: [false, true])
    func `an audience of nobody is a NOTICE, and names the tags that no token of the topic has`(isLarge: Bool) throws {
        let stage = try CampaignStage(tokens: 40)
        try stage.database.psql(
            "SELECT tokenkeeper.register('aa', 'com.example.app', tags => ARRAY['it''s ' || chr(92) || ' \"odd\"'])",
            user: "a_app")
        try stage.database.psql(
            "SELECT tokenkeeper.ensure_topic('production', 'empty'), tokenkeeper.register('bb', 'other', tags => '{elsewhere}')"
        )
        if isLarge {
            // The size of a ledger whose statistics say which tags are common.
            try stage.database.psql(
                """
                INSERT INTO tokenkeeper.ledger (registered_at, topic_id, token_key, tags)
                SELECT now(), 1, sha256(i::text::bytea), '{World}' FROM generate_series(1, 160000) AS i;
                ANALYZE tokenkeeper.ledger
                """)
            #expect(
                try stage.database.psql("SELECT pg_relation_size('tokenkeeper.ledger') > 16777216") == "t",
                "large enough")
        }
        func unknown(_ tags: String) throws -> [String] {
            try notices(stage, "tags => '\(tags)'").split(separator: "\n").filter { $0.contains("has the tag") }.map {
                String($0).replacing("NOTICE:  no token of com.example.app (production) has the tag ", with: "")
            }
        }
        #expect(try unknown("World && !n:40 || \"it''s \\ \"\"odd\"\"\"") == [])
        #expect(try unknown("(World || elsewhere) && !mutde") == ["'elsewhere'", "'mutde'"])
        #expect(try unknown("world && \"o''clock\"") == ["'o''clock'", "'world'"])
        #expect(
            try notices(stage, "everyone => true", topic: "empty").contains(
                "NOTICE:  empty (production) has no token\n"))
        #expect(try !notices(stage, "tokens => '{cc}'", topic: "empty").contains("has no token"))
    }

    @Test func `a missing credential is a NOTICE`() throws {
        let stage = try CampaignStage(tokens: 1)
        func notices() throws -> String { try self.notices(stage, "everyone => true") }
        #expect(try notices().contains("no running daemon sends: the campaign waits"))
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.sending_daemon (daemon_id, process_scope, heartbeat_at, credentials, problems)
            VALUES ('a', '', clock_timestamp(), '[{"topics":["com.other"],"environments":["production"]},{"topics":["com.example.*"],"environments":["sandbox"]}]', '{}')
            """)
        #expect(
            try notices().contains(
                "no running daemon has a credential for com.example.app (production): the campaign waits"))
        try stage.database.psql(
            "UPDATE tokenkeeper.sending_daemon SET credentials = '[{\"topics\":[\"com.example.*\"],\"environments\":[\"production\"]}]'"
        )
        #expect(try !notices().contains("NOTICE"))
        // A person has cancelled the campaign, and wonders.
        let again = "everyone => true, idempotency_key => 'k'"
        let campaign = try stage.enqueue(again, payload: "{}")
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        let repeated = try TestCluster.run(
            [
                "sh", "-c", "psql -XAtq -d \"$1\" -c \"SELECT tokenkeeper.enqueue('{}', 'com.example.app', $2)\" 2>&1",
                "sh",
                stage.database.url(user: "a_sender"), again,
            ], input: "")
        #expect(repeated.contains("campaign \(campaign) has this idempotency_key and is cancelled: nothing is sent"))
        #expect(repeated.contains("\n\(campaign)"))
    }

    @Test func `the error for an unknown topic names one that may be meant`() throws {
        let stage = try CampaignStage(tokens: 1)
        func hint(_ arguments: String) throws -> String {
            try TestCluster.run(
                [
                    "sh", "-c",
                    "psql -XAtq -d \"$1\" -c \"SELECT tokenkeeper.enqueue('{}', $2, everyone => true)\" 2>&1 || true",
                    "sh", stage.database.url(user: "a_sender"), arguments,
                ],
                input: ""
            ).split(separator: "\n").filter { $0.hasPrefix("HINT:  ") }.map { String($0.dropFirst(7)) }.joined()
        }
        #expect(try hint("'com.example.app', 'sandbox'") == "It is known in environment 'production'.")
        #expect(try hint("'com.example.App'") == "Did you mean 'com.example.app'?")
        #expect(try hint("'com.exmaple.app'") == "Did you mean 'com.example.app'?")
        #expect(try hint("'org.other'").hasPrefix("tokenkeeper.topic_policy lists the known topics"))
    }

    // Pause, resume, cancel --------------------------------------------------------------------------------------------

    @Test func `a role manages its own campaigns, and an operator all`() throws {
        let stage = try CampaignStage(tokens: 3)
        let theirs = try stage.enqueue(user: "owner")
        let mine = try stage.enqueue()
        for act in ["pause", "resume", "cancel"] {
            let failure = #expect(throws: TestFailure.self) {
                try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(\(theirs))", user: "a_sender")
            }
            #expect(failure?.description.contains("belongs to owner") == true)
            #expect(throws: TestFailure.self) {
                try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(99)", user: "a_operator")
            }
            #expect(try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(\(mine))", user: "a_sender") == "t")
            #expect(
                try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(\(mine))", user: "a_sender") == "f", "again"
            )
            #expect(try stage.database.psql("SELECT tokenkeeper.\(act)_campaign(\(theirs))", user: "a_operator") == "t")
        }
        #expect(
            try stage.database.psql(
                "SELECT string_agg(operation, ' ' ORDER BY operation_id) FROM tokenkeeper.operation WHERE done_by = 'a_sender'"
            )
                == "campaign_paused campaign_resumed campaign_cancelled")
    }

    @Test func `the rate of a campaign is changed by its role or an operator`() throws {
        let stage = try CampaignStage(tokens: 600)
        let campaign = try stage.enqueue("everyone => true, name => 'Mars: live', idempotency_key => 'k'")
        try stage.addressAll(campaign)
        func set(_ rate: String, of campaign: Int, by user: String = "a_sender") throws -> String {
            try stage.database.psql("SELECT tokenkeeper.set_campaign_rate(\(campaign), \(rate))", user: user)
        }
        #expect(try set("100", of: campaign) == "t" && set("100", of: campaign) == "f")
        #expect((50...125).contains(try stage.claim(campaign).count))
        #expect(try set("NULL", of: campaign, by: "a_operator") == "t" && set("NULL", of: campaign) == "f")
        #expect(try stage.claim(campaign, most: 10_000).count > 400, "the rest at once, except of what is claimed")
        #expect(
            try stage.database.psql("SELECT done_by, message FROM tokenkeeper.operation ORDER BY operation_id") == """
                a_sender|campaign 1, max_per_second is 100, was unlimited: Mars: live
                a_operator|campaign 1, max_per_second is unlimited, was 100: Mars: live
                """)
        for rate in ["0", "1000001"] {
            let failure = #expect(throws: TestFailure.self) { try set(rate, of: campaign) }
            #expect(failure?.description.contains("max_per_second is \(rate), expected 1 to 1000000, or null") == true)
        }
        let theirs = try stage.enqueue(user: "owner")
        for (refused, text) in [(theirs, "belongs to owner"), (99, "there is no campaign 99")] {
            let failure = #expect(throws: TestFailure.self) { try set("1", of: refused) }
            #expect(failure?.description.contains(text) == true)
        }
        #expect(
            try stage.enqueue("everyone => true, name => 'Mars: live', idempotency_key => 'k'") == campaign,
            "the key belongs to what enqueue was given")
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        #expect(try set("1", of: campaign) == "f", "it is over")
    }

    @Test func `forget removes the name from what was logged about a campaign`() throws {
        let stage = try CampaignStage(tokens: 1)
        let campaign = try stage.enqueue("device_id => 'd1', name => 'for d1'")
        try stage.database.psql(
            "SELECT tokenkeeper.set_campaign_rate(\(campaign), 1), tokenkeeper.pause_campaign(\(campaign))",
            user: "a_sender")
        try stage.database.psql("SELECT tokenkeeper.forget_device('d1')", user: "a_app")
        #expect(
            try stage.database.psql(
                "SELECT message FROM tokenkeeper.operation WHERE operation LIKE 'campaign%' ORDER BY 1")
                == "campaign \(campaign)\ncampaign \(campaign), max_per_second is 1, was unlimited")
    }

    @Test func `a paused campaign sends nothing, and goes on where it was`() throws {
        let stage = try CampaignStage(tokens: 1200)
        let campaign = try stage.enqueue()
        try stage.address(campaign)
        let claimed = try stage.claim(campaign, most: 600)
        #expect(claimed.count == 550)
        let (sent, unsent) = (Array(claimed.keys.prefix(100)), Array(claimed.keys.dropFirst(100)))
        let retried = sent[0]
        try stage.finish([.init(number: retried, fate: "later", status: 503, pause: 0)])
        try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender")
        #expect(try stage.due() == "")
        #expect(try stage.claim(campaign).isEmpty && stage.claimSingle().isEmpty && stage.address(campaign) == nil)
        #expect(
            try stage.database.psql(
                "SELECT count(*), count(*) FILTER (WHERE is_gone) FROM tokenkeeper.recalled_requests('a', '{\(claimed.keys.map(String.init).joined(separator: ","))}')",
                user: "a_daemon") == "550|1", "the one that has moved is gone from its batch")
        // What is in flight ends; a retry waits for the resume; the others go back.
        try stage.finish(sent.dropFirst().dropLast().map { .accepted($0) })
        try stage.finish([.init(number: sent.last!, fate: "later", status: 429, pause: 0)])
        try stage.finish(unsent.map { .returned($0) })
        #expect(try stage.claimSingle().isEmpty)
        #expect(try stage.progress(campaign) == "1000|902|98|0|0|0|0|0|0")
        try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(campaign))", user: "a_sender")
        #expect(Set(try stage.claimSingle().values) == [claimed[retried]!, claimed[sent.last!]!])
        try stage.addressAll(campaign)
        var rest = Set<Int>()
        while case let more = try stage.claim(campaign), !more.isEmpty { rest.formUnion(more.keys) }
        #expect(rest.count == 1100 && rest.isSuperset(of: unsent) && rest.isDisjoint(with: sent))
    }

    @Test func `a paused campaign ends if nothing of it is left, and otherwise waits`() throws {
        let stage = try CampaignStage(tokens: 2)
        let (all, part) = (try stage.enqueue(), try stage.enqueue())
        let none = try stage.enqueue()
        for campaign in [all, part] { try stage.addressAll(campaign) }
        let claimed = [all: Array(try stage.claim(all).keys), part: Array(try stage.claim(part).keys)]
        for campaign in [all, part, none] {
            #expect(
                try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender") == "t")
        }
        try stage.finish(claimed[all]!.map { .accepted($0) } + [.accepted(claimed[part]![0])])
        #expect(try stage.state(all) == "ended" && stage.progress(all) == "2|0|2|0|0|0|0|0|0")
        #expect(try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(all))", user: "a_sender") == "f")
        #expect(try stage.state(part) == "paused" && stage.state(none) == "paused", "one request, and all are left")
        try stage.finish([.returned(claimed[part]![1])])
        #expect(try stage.state(part) == "paused")
    }

    @Test func `a cancelled campaign ends what waits at once, and what is in flight truthfully`() throws {
        let stage = try CampaignStage(tokens: 1200)
        let campaign = try stage.enqueue()
        try stage.address(campaign)
        let claimed = Array(try stage.claim(campaign, most: 600).keys)
        try stage.finish([.init(number: claimed[0], fate: "later", status: 503, pause: 0)])
        try stage.finish([.init(number: claimed[1], fate: "later", status: 503, pause: 0)])
        let single = try #require(try stage.claimSingle(most: 1).keys.first)
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        #expect(try stage.progress(campaign) == "1000|549|0|0|0|0|0|451|0")
        #expect(try stage.address(campaign) == nil && stage.claim(campaign).isEmpty && stage.claimSingle().isEmpty)
        try stage.finish([
            .accepted(claimed[2]), .returned(claimed[3]),
            .init(number: claimed[4], fate: "later", status: 429, pause: 9),
        ])
        try stage.finish([
            .init(number: claimed[5], fate: "interrupted"), .init(number: claimed[6], status: 410, outcome: "stale"),
        ])
        #expect(try stage.progress(campaign) == "1000|544|1|1|0|0|1|453|0")
        try stage.finish([.init(number: single, fate: "later", status: 503, pause: 0)])
        #expect(try stage.count("send_request") == 0)
        #expect(try stage.state(campaign) == "cancelled" && stage.count("campaign", "ended_at IS NULL") == 1)
        try stage.finish(claimed.dropFirst(7).map { .returned($0) })
        #expect(try stage.progress(campaign) == "1000|0|1|1|0|0|1|997|0")
        #expect(try stage.state(campaign) == "cancelled" && stage.count("campaign", "ended_at IS NULL") == 0)
        #expect(
            try stage.database.psql("SELECT error FROM tokenkeeper.failed_send").contains("may have been delivered"))
    }

    // Afterwards -------------------------------------------------------------------------------------------------------

    @Test func `delivery tells what became of each request`() throws {
        let stage = try CampaignStage(tokens: 8)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let byToken = Dictionary(uniqueKeysWithValues: try stage.claim(campaign).map { ($1, $0) })
        #expect(try stage.delivery(byToken[1]!) == "waiting")
        let theirs = try stage.enqueue(user: "owner")
        try stage.addressAll(theirs)
        let first = -(theirs << 32 | 1 << 9 | 1)
        #expect(try stage.delivery(first) == "waiting" && stage.delivery(first, user: "a_reader") == "waiting")
        #expect(try stage.delivery(byToken[1]!, user: "a_sender") == "waiting")
        #expect(try stage.delivery(first, user: "a_sender") == "", "a sender sees its own only")
        try stage.finish([
            .accepted(byToken[1]!), .init(number: byToken[2]!, status: 410),
            .init(number: byToken[3]!, status: 400, outcome: "suspect"),
            .init(number: byToken[4]!, fate: "failed", status: 413, error: "too large"),
            .init(number: byToken[5]!, fate: "later", status: 503, pause: 0), .returned(byToken[6]!),
        ])
        let expected = ["accepted", "stale", "suspect", "failed", "waiting", "waiting", "waiting", "waiting"]
        for (number, state) in zip(1...8, expected) {
            #expect(try stage.delivery(byToken[number]!) == state, "\(number)")
        }
        #expect(
            try stage.database.psql(
                "SELECT message FROM tokenkeeper.delivery(tokenkeeper.campaign_apns_id(\(campaign), \(-byToken[4]! & 0xffff_ffff)))"
            )
                == "too large")
        #expect(
            try stage.database.psql("SELECT tokenkeeper.delivery(gen_random_uuid()), tokenkeeper.delivery('\(UUID())')")
                == "")
        #expect(try stage.progress(campaign) == "8|4|1|1|1|0|1|0|0")
        #expect(try stage.count("send_result") == 5)
        // The failed one is queued as a single request, with the campaign's content.
        try stage.database.psql("SELECT tokenkeeper.requeue_failed()", user: "a_operator")
        #expect(
            try stage.count(
                "send_request",
                "campaign_id IS NULL AND payload::jsonb = '\(CampaignStage.alert)' AND push_type = 'alert'") == 1)
        #expect(try stage.progress(campaign) == "8|4|1|1|1|0|1|0|0")
    }

    @Test(arguments: [(1, 513), (1 << 30 - 1, 0xffff_ffff), (77, 8_388_607 << 9 | 500)])
    func `an apns-id encodes campaign and number`(campaign: Int, number: Int) throws {
        let stage = try CampaignStage()
        let id = String(format: "%08x-%04x-8000-8000-%012x", campaign >> 16, campaign & 0xffff, number)
        #expect(try stage.database.psql("SELECT tokenkeeper.campaign_apns_id(\(campaign), \(number))") == id)
        #expect(
            try stage.database.psql("SELECT campaign_id, number FROM tokenkeeper.campaign_request_of('\(id)')")
                == "\(campaign)|\(number)")
    }

    @Test func `the sweep's function deletes an ended campaign in parts, and keeps what is needed`() throws {
        let stage = try CampaignStage(tokens: 600)
        let (ended, running) = (try stage.enqueue(), try stage.enqueue())
        for campaign in [ended, running] { try stage.addressAll(campaign) }
        let claimed = Array(try stage.claim(ended).keys)
        try stage.finish([.init(number: claimed[0], fate: "failed", error: "x")])
        for number in claimed.dropFirst() { try stage.finish([.accepted(number)]) }
        #expect(try stage.state(ended) == "ended")
        func delete(_ most: Int) throws -> String {
            try stage.database.psql(
                "SELECT deleted, has_more FROM tokenkeeper.delete_campaigns(now(), \(most))", user: "a_daemon")
        }
        #expect(try delete(500) == "0|f", "failed_send has one of its requests")
        try stage.database.psql("DELETE FROM tokenkeeper.failed_send", user: "a_operator")
        #expect(try delete(500) == "0|t")
        #expect(try delete(500) == "1|f")
        #expect(try delete(500) == "0|f")
        #expect(
            try stage.count("campaign_ending") == 0 && stage.count("campaign") == 1 && stage.count("campaign_batch") > 0
        )
        let list = try stage.enqueue("tokens => '{aa,bb,cc}'")
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(list))", user: "a_sender")
        #expect(try delete(2) == "0|t")
        #expect(try delete(2) == "0|t" && stage.count("campaign_token") == 0)
        #expect(try delete(2) == "0|f")
    }

    @Test func `requests that somebody deletes from send_request count as cancelled`() throws {
        let stage = try CampaignStage(tokens: 2)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let claimed = Array(try stage.claim(campaign).keys)
        try stage.finish([.accepted(claimed[0]), .init(number: claimed[1], fate: "later", status: 503, pause: 0)])
        try stage.database.psql("DELETE FROM tokenkeeper.send_request", user: "a_operator")
        #expect(try stage.state(campaign) == "ended")
        #expect(try stage.progress(campaign) == "2|0|1|0|0|0|0|1|0")
    }
}
