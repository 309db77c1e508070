import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// Campaigns on all shards, by one call on a router. Claims in SQL take the place of the daemons.
@Suite(.ownThread) struct `Campaigns through a router` {
    private let shards: TestShards
    private let stages: [CampaignStage]
    private var router: TestDatabase { shards.routers[0] }
    private static let topic = CampaignStage.topic

    /// 40 tokens, registered through the router: token n has the user u(n % 10), the device dn, and the tags World and n:n.
    init() throws {
        shards = try TestShards()
        stages = shards.shards.map(CampaignStage.init(on:))
        try router.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(Self.topic)', registered_at => now() - interval '1 hour',
                                              device_id => 'd' || i, user_id => 'u' || i % 10, tags => ARRAY['World', 'n:' || i]))
            FROM generate_series(1, 40) AS i
            """, user: "a_app")
        for shard in shards.shards {
            try #require(Int(try shard.psql("SELECT count(*) FROM tokenkeeper.ledger")) ?? 0 > 3)
        }
    }

    private func call(_ arguments: String, payload: String = CampaignStage.alert) -> String {
        "SELECT tokenkeeper.enqueue('\(payload)', '\(Self.topic)', \(arguments))"
    }

    private func enqueue(_ arguments: String = "everyone => true") throws -> Int {
        Int(try router.psql(call(arguments), user: "a_sender")) ?? -1
    }

    private func onEach(_ query: String) throws -> [String] {
        try shards.shards.map { try $0.psql(query) }
    }

    private func fails(_ statement: String, as user: String = "a_sender") throws -> DatabaseError {
        var connection = try router.connect(user: user)
        return try #require(throws: DatabaseError.self) { try connection.execute(statement) }
    }

    /// The tokens that each shard would send to, and the apns-ids, after all is addressed and claimed.
    private func claim(_ campaign: Int) throws -> (tokens: [[Int]], apnsIDs: [String]) {
        var apnsIDs: [String] = []
        let tokens = try stages.enumerated().map { number, stage in
            try stage.addressAll(campaign)
            let claimed = try stage.claim(campaign)
            for request in claimed.keys {
                apnsIDs.append(
                    try #require(CampaignRequest(number: Int64(request))).apnsID(onShard: number))
            }
            return Array(claimed.values)
        }
        return (tokens, apnsIDs)
    }

    // The audience -----------------------------------------------------------------------------------------------------

    private static let audiences: [(String, Set<Int>)] = [
        ("everyone => true", Set(1...40).subtracting([7])),
        ("tags => 'World && !n:3'", Set(1...40).subtracting([3, 7])),
        ("user_id => 'u3'", [3, 13, 23, 33]), ("device_id => 'd5'", [5]), ("device_id => 'nobody'", []),
        ("tokens => '{\((1...12).map(CampaignStage.token).joined(separator: ","))}'", Set(1...12).subtracting([7])),
        ("tokens => '{\(CampaignStage.token(9)),\(CampaignStage.token(9)),ABCD}'", [9, 0xabcd]),
    ]

    @Test(arguments: audiences)
    func `an audience is that of one database: each token once, on its shard, and audience_size counts them`(
        arguments: String, expected: Set<Int>
    ) throws {
        try CampaignStage(on: shards.shard(of: CampaignStage.token(7))).suppress(7)
        let campaign = try enqueue(arguments)
        let claimed = try claim(campaign)
        #expect(claimed.tokens.joined().count == expected.count && Set(claimed.tokens.joined()) == expected)
        for (number, tokens) in claimed.tokens.enumerated() {
            for token in tokens where token <= 40 {
                #expect(try shards.shard(of: CampaignStage.token(token)).name == shards.shards[number].name)
            }
        }
        #expect(Set(claimed.apnsIDs).count == expected.count, "no two shards have the same apns-id")
        #expect(
            try router.psql("SELECT tokenkeeper.audience_size('\(Self.topic)', \(arguments))", user: "a_sender")
                == "\(expected.count)")
        // A shard that has none of them has nothing to do.
        for stage in stages where try stage.count("campaign_batch") == 0 {
            #expect(try stage.state(campaign) == "ended")
        }
    }

    @Test func `the progress is the exact sum of all shards, and delivery asks the shard that has sent`() throws {
        let campaign = try enqueue("tags => 'World'")
        let claimed = try claim(campaign)
        #expect(
            try router.psql(
                "SELECT state, addressed, waiting, shards FROM tokenkeeper.campaign_progress", user: "a_sender")
                == "running|40|40|{0,1,2,3}")
        // On each shard, one is stale. The others are accepted.
        for stage in stages {
            let numbers = try stage.database.psql("SELECT tokenkeeper.claimed_campaign_requests('a')", user: "a_daemon")
                .split(separator: "\n").compactMap { Int($0) }
            try stage.finish(
                numbers.dropLast().map { .accepted($0) } + [
                    CampaignStage.Word(number: numbers.last!, status: 410, outcome: "stale")
                ])
            try stage.end()
        }
        #expect(
            try router.psql(
                """
                SELECT campaign_id, state, addressed, waiting, accepted, stale, expected, is_addressed, ended_at IS NOT NULL, audience, shards
                FROM tokenkeeper.campaign_progress
                """, user: "a_reader")
                == "\(campaign)|ended|40|0|36|4|40|t|t|tags: World|{0,1,2,3}")
        let each = "SELECT addressed FROM tokenkeeper_shard.campaign_progress ORDER BY shard"
        #expect(
            try router.psql(each, user: "a_sender").split(separator: "\n").map { Int($0) }
                == claimed.tokens.map(\.count))
        var states: [String: Int] = [:]
        for id in claimed.apnsIDs {
            let told = try router.psql(
                "SELECT campaign_id, state FROM tokenkeeper.delivery('\(id)')", user: "a_sender")
            states[told, default: 0] += 1
        }
        #expect(states == ["\(campaign)|accepted": 36, "\(campaign)|stale": 4])
        // The instant does not depend on how the sessions write one.
        let id = try #require(claimed.apnsIDs.first)
        let instant = "SELECT extract(epoch FROM at) FROM tokenkeeper.delivery('\(id)')"
        let expected = try onEach(instant).joined()
        for shard in shards.shards {
            try shard.psql("ALTER ROLE a_sender IN DATABASE \(shard.name) SET datestyle = 'SQL, DMY'", user: "postgres")
        }
        var sender = try router.connect(user: "a_sender")
        #expect(try sender.scalar("\(instant)") == expected && expected.count > 10, "\(expected)")
        #expect(
            try router.psql(
                "SELECT count(*) FROM (SELECT * FROM tokenkeeper.delivery(gen_random_uuid()) UNION ALL SELECT * FROM tokenkeeper.delivery(NULL)) AS d",
                user: "a_sender") == "0")
        // The notices and rows of a shard use the same apns-ids.
        #expect(
            try onEach(
                "SELECT count(*) FROM tokenkeeper.send_result WHERE apns_id::uuid = ANY ('{\(claimed.apnsIDs.joined(separator: ","))}')"
            )
                == claimed.tokens.map { "\($0.count)" })
    }

    // One campaign ------------------------------------------------------------------------------------------------------

    @Test func `a campaign has one id on all shards, and a repetition is the same campaign`() throws {
        let key = "everyone => true, name => 'Mars', idempotency_key => 'k', max_per_second => 10"
        let campaign = try enqueue(key)
        #expect(try enqueue(key) == campaign)
        #expect(Int(try shards.routers[1].psql(call(key), user: "a_sender")) == campaign)
        #expect(
            try onEach("SELECT campaign_id, max_per_second, name FROM tokenkeeper.campaign")
                == ["3", "3", "2", "2"].map { "\(campaign)|\($0)|Mars" })
        #expect(
            try router.psql("SELECT max_per_second, state FROM tokenkeeper.campaign_progress", user: "a_reader")
                == "10|waiting")
        let other = try fails(call("tags => 'World', idempotency_key => 'k'"))
        #expect(
            other.sqlState == "22023"
                && other.message.contains("belongs to campaign \(campaign), which has another content"),
            "\(other)")
        // Without a key, each call is another campaign, whichever shard chooses its id.
        var ids: Set<Int> = [campaign]
        for _ in 1...12 { ids.insert(try enqueue()) }
        #expect(ids.count == 13)
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.campaign") == Array(repeating: "13", count: 4))
        #expect(try router.psql("SELECT count(*) FROM tokenkeeper.campaign_progress", user: "a_sender") == "13")
        #expect(
            try router.psql("SELECT open_campaigns FROM tokenkeeper.status", user: "a_reader")
                == stages[0].database.psql("SELECT count(*) FROM tokenkeeper.campaign"),
            "status counts a campaign once")
    }

    @Test func `ids that campaigns of a shard have already are not chosen again`() throws {
        for (number, shard) in shards.shards.enumerated() {
            // As in a database that was no shard then.
            try shard.psql(
                "SELECT setval('tokenkeeper.campaign_campaign_id_seq', \(100 * (number + 1)))", user: "postgres")
            try shard.psql(call("everyone => true"), user: "a_sender")
            try shard.psql("SELECT setval('tokenkeeper.campaign_campaign_id_seq', 1)", user: "postgres")
        }
        let before = Set(try onEach("SELECT campaign_id FROM tokenkeeper.campaign"))
        for _ in 1...30 { #expect(!before.contains("\(try enqueue())")) }
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.campaign") == Array(repeating: "31", count: 4))
    }

    @Test(arguments: ["1000000000000, NULL", "NULL, 1000000000000", "0, NULL", "-1, NULL"])
    func `a sender who calls a shard cannot use up its ids`(ids: String) throws {
        let shard = shards.shards[1]
        let failure = try #require(throws: TestFailure.self) {
            try shard.psql(
                """
                SELECT tokenkeeper.create_campaign('\(CampaignStage.alert)', '\(Self.topic)', 'production', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                                                   NULL, true, NULL, NULL, NULL, true, \(ids))
                """, user: "a_sender")
        }
        #expect(failure.description.contains("is out of range, expected 1 to 1000"), "\(failure)")
        #expect(try shard.psql("SELECT count(*) FROM tokenkeeper.campaign") == "0")
    }

    @Test func `nothing is created if a shard does not answer, or if the call is wrong`() throws {
        try shards.withShardDown(2) {
            let error = try fails(call("everyone => true, idempotency_key => 'k'"))
            #expect(
                error.message.hasPrefix("nothing was created, because a shard failed")
                    && error.message.contains(shards.shards[2].name), "\(error)")
            #expect(
                try fails("SELECT tokenkeeper.audience_size('\(Self.topic)', everyone => true)").message.contains(
                    shards.shards[2].name))
            #expect(try fails("SELECT * FROM tokenkeeper.campaign_progress").sqlState == "08001")
        }
        for (arguments, code, message) in [
            ("tags => 'World &&'", "22023", "the tag expression"),
            ("tags => 'World', everyone => true", "22023", "addressed is more than one"),
            ("everyone => true, max_per_second => 3", "22003", "max_per_second is 3, expected 4 to 1000000"),
            ("tokens => '{zz}'", "22023", "token 1 is malformed"),
            ("tokens => '{}'", "0A000", "tokens is empty"),
            ("everyone => true, expiration => '2020-01-01Z'", "22023", "expiration has passed"),
        ] {
            let error = try fails(call(arguments))
            #expect(error.sqlState == code && error.message.contains(message), "\(error)")
        }
        let unknown = try fails("SELECT tokenkeeper.enqueue('{}', 'com.example.none', everyone => true)")
        #expect(unknown.sqlState == "22023" && unknown.message.contains("com.example.none"), "\(unknown)")
        #expect(try fails(call("everyone => true"), as: "a_app").sqlState == "42501")
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.campaign") == Array(repeating: "0", count: 4))
        // A list that is copied has no router.
        #expect(
            try fails("INSERT INTO tokenkeeper.campaign_token (campaign_id, token) VALUES (1, 'aa')").sqlState
                == "42P01")
    }

    /// The last shard that creates its part is the one that fails: after all have been asked.
    @Test func `a campaign that one shard could not create is completed by a repetition`() throws {
        // The shard that chooses the id creates it first; the others fail one by one.
        let failing = [1, 3]
        for number in failing {
            try shards.shards[number].psql(
                """
                CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''the disk is full'' USING ERRCODE = ''disk_full''; END';
                CREATE TRIGGER fail BEFORE INSERT ON tokenkeeper.campaign FOR EACH ROW EXECUTE FUNCTION public.fail();
                """, user: "postgres")
        }
        let key = try #require(try (1...50).map { "k\($0)" }.first { try chooser($0) == 0 })
        let arguments = "tags => 'World', idempotency_key => '\(key)'"
        var connection = try router.connect(user: "a_sender")
        let error = try #require(throws: DatabaseError.self) { try connection.execute(call(arguments)) }
        #expect(error.sqlState == "53100")
        #expect(
            error.message.contains("was created on shards 0, 2, and not on shards 1, 3: ")
                && error.message.contains("the disk is full"), "\(error)")
        #expect(try onEach("SELECT count(*) FROM tokenkeeper.campaign") == ["1", "0", "1", "0"])
        #expect(
            try router.psql("SELECT shards, state FROM tokenkeeper.campaign_progress", user: "a_reader")
                == "{0,2}|waiting")
        let campaign = Int(try shards.shards[0].psql("SELECT campaign_id FROM tokenkeeper.campaign")) ?? -1
        // A paused half is completed only after it goes on: the rest would be sent otherwise.
        #expect(try router.psql("SELECT tokenkeeper.pause_campaign(\(campaign))", user: "a_sender") == "t")
        for number in failing {
            try shards.shards[number].psql("DROP TRIGGER fail ON tokenkeeper.campaign", user: "postgres")
        }
        let paused = try fails(call(arguments))
        #expect(paused.sqlState == "55000" && paused.message.contains("it is paused"), "\(paused)")
        #expect(try router.psql("SELECT tokenkeeper.resume_campaign(\(campaign))", user: "a_sender") == "t")
        // Its age: a shard may have deleted its part.
        try shards.shards[0].psql("UPDATE tokenkeeper.campaign SET created_at = created_at - interval '13 hours'")
        #expect(try fails(call(arguments)).message.contains("was created more than 12 hours ago"))
        try shards.shards[0].psql("UPDATE tokenkeeper.campaign SET created_at = created_at + interval '13 hours'")
        #expect(try enqueue(arguments) == campaign)
        #expect(try onEach("SELECT campaign_id FROM tokenkeeper.campaign") == Array(repeating: "\(campaign)", count: 4))
        #expect(try claim(campaign).tokens.joined().count == 40)
        #expect(try enqueue(arguments) == campaign, "once more")
    }

    /// As the router: which shard chooses the id.
    private func chooser(_ key: String) throws -> Int {
        Int(
            try router.psql(
                "SELECT (get_byte(sha256('\(key)'), 0) << 8 | get_byte(sha256('\(key)'), 1)) & 3", user: "postgres"))
            ?? -1
    }

    // The confirmation --------------------------------------------------------------------------------------------------

    @Test func `the confirmation is asked for the share of the whole audience`() throws {
        try router.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(Self.topic)', tags => ARRAY['More', CASE WHEN i % 4 = 0 THEN 'Few' ELSE 'Many' END])) FROM generate_series(1001, 1160) AS i",
            user: "a_app")
        try router.psql("UPDATE tokenkeeper.topic_policy SET confirm_share = 0.5", user: "a_operator")
        // Of 200 tokens. No shard alone has more than 50 of these.
        for audience in ["everyone => true", "tags => 'More'"] {
            let error = try fails(call(audience))
            let percent = audience.hasPrefix("tags") ? 80 : 100
            #expect(
                error.sqlState == "22023"
                    && error.message.contains("about \(percent) % of the tokens of \(Self.topic) (production)"),
                "\(error)")
            #expect(try enqueue(audience + ", confirm => true") > 0)
        }
        let many = (1001...1120).map(CampaignStage.token).joined(separator: ",")
        #expect(try fails(call("tokens => '{\(many)}'")).message.contains("about 60 %"))
        for audience in ["tags => 'World'", "tags => 'Few'", "user_id => 'u1'"] { #expect(try enqueue(audience) > 0) }
    }

    // Changes -----------------------------------------------------------------------------------------------------------

    @Test func `a campaign is paused, resumed and cancelled on all shards, and its rate is divided`() throws {
        let campaign = try enqueue()
        let states = { try onEach("SELECT state FROM tokenkeeper.campaign") }
        func change(_ function: String, as user: String = "a_sender") throws -> String {
            try router.psql("SELECT tokenkeeper.\(function)", user: user)
        }
        #expect(try change("pause_campaign(\(campaign))") == "t")
        #expect(try states() == Array(repeating: "paused", count: 4))
        #expect(try change("pause_campaign(\(campaign))") == "f")
        #expect(try change("resume_campaign(\(campaign))", as: "a_operator") == "t")
        #expect(try states() == Array(repeating: "waiting", count: 4))
        #expect(try change("set_campaign_rate(\(campaign), 103)") == "t")
        let rates = { try onEach("SELECT coalesce(max_per_second, 0) FROM tokenkeeper.campaign") }
        #expect(try rates() == ["26", "26", "26", "25"])
        #expect(try change("set_campaign_rate(\(campaign), 103)") == "f")
        #expect(
            try fails("SELECT tokenkeeper.set_campaign_rate(\(campaign), 3)").message.contains("expected 4 to 1000000"))
        #expect(try change("set_campaign_rate(\(campaign), NULL)") == "t")
        #expect(try rates() == ["0", "0", "0", "0"])
        try shards.withShardDown(3) {
            let error = try fails("SELECT tokenkeeper.cancel_campaign(\(campaign))")
            #expect(
                error.message.hasPrefix("cancel_campaign failed on shard 3, and the other shards have done it: ")
                    && error.message.contains("not currently accepting connections"), "\(error)")
        }
        #expect(try states() == ["cancelled", "cancelled", "cancelled", "waiting"])
        #expect(
            try router.psql("SELECT state FROM tokenkeeper.campaign_progress", user: "a_reader") == "waiting",
            "that of the shard which would still send")
        // The session whose connection to the shard was ended notices that with one more error.
        try eventually("all shards answer") { (try? change("cancel_campaign(\(campaign))")) == "t" }
        #expect(try states() == Array(repeating: "cancelled", count: 4))
        #expect(try router.psql("SELECT state FROM tokenkeeper.campaign_progress", user: "a_reader") == "cancelled")
        #expect(try fails("SELECT tokenkeeper.pause_campaign(99)").message.contains("99"))
        let other = try router.psql(call("everyone => true"), user: "postgres")
        let stranger = try fails("SELECT tokenkeeper.pause_campaign(\(other))")
        #expect(
            stranger.sqlState == "42501" && stranger.message.hasPrefix("pause_campaign failed on all shards: ")
                && stranger.message.contains("campaign \(other) belongs to postgres"), "\(stranger)")
    }

    @Test func `why a campaign waits names the shards, unless it is the same on all`() throws {
        let campaign = try enqueue()
        func reason() throws -> String {
            try router.psql(
                "SELECT reason, needs_help FROM tokenkeeper.campaign_wait WHERE campaign_id = \(campaign)",
                user: "a_sender")
        }
        #expect(try reason() == "no running daemon sends|t")
        for shard in shards.shards.dropLast() {
            try shard.psql(
                "INSERT INTO tokenkeeper.sending_daemon VALUES ('d', 'here', now(), NULL, '[{\"name\":\"main\",\"topics\":[\"*\"]}]', '{}')"
            )
        }
        #expect(try reason() == "shard 3: no running daemon sends|t")
    }

    @Test func `tagged_tokens are those of all shards, in order`() throws {
        func tagged(_ expression: String, most: Int = 100) throws -> [Int] {
            try router.psql(
                "SELECT token FROM tokenkeeper.tagged_tokens('\(expression)', '\(Self.topic)', at_most => \(most))",
                user: "a_reader"
            ).split(separator: "\n").compactMap { Int($0, radix: 16) }
        }
        #expect(try tagged("World && !n:2") == [1] + Array(3...40))
        #expect(try tagged("World", most: 5) == Array(1...5))
    }
}
