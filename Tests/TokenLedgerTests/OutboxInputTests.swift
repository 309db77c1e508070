import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// The functions of the outbox with any input: any collation, any escapes, any length.
@Suite(.ownThread) struct `Input of the outbox` {
    let database: TestDatabase
    let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
    let scope = TopicScope(environment: "production", topic: "com.example.app")

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func count(_ table: String, _ condition: String = "true") throws -> Int {
        Int(try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")) ?? -1
    }

    private func claim() throws -> Outbox.Claim {
        var daemon = try database.connect(user: "a_daemon")
        return try outbox.claim(scope, most: 100, backgroundPerHour: 3, on: &daemon)
    }

    /// - Returns: The SQLSTATE and the message of what it raises.
    private func refusal(_ statement: String, user: String = "a_sender") throws -> (state: String?, message: String) {
        var sender = try database.connect(user: user)
        do {
            try sender.execute(statement)
            return (nil, "nothing is raised")
        } catch let error as DatabaseError {
            return (error.sqlState, error.message)
        }
    }

    // Collations -------------------------------------------------------------------------------------------------------

    /// A nondeterministic collation takes Production for production, and refuses patterns.
    @Test(arguments: ["\"C\"", "public.icu", "public.ignoring_case"])
    func `the collation of an argument changes nothing`(collation: String) throws {
        try database.psql(
            """
            CREATE COLLATION public.icu (PROVIDER = icu, LOCALE = 'de');
            CREATE COLLATION public.ignoring_case (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false)
            """, user: "postgres")
        var owner = try database.connect()
        try owner.execute(
            """
            SELECT tokenkeeper.register('aa', 'com.example.app', tags => '{World}', device_id => 'd');
            CREATE TEMPORARY TABLE a (topic text COLLATE \(collation), other text COLLATE "C", environment text COLLATE \(collation),
                wrong text COLLATE \(collation), tags text COLLATE \(collation), word text COLLATE \(collation), device text COLLATE \(collation));
            INSERT INTO a VALUES ('com.example.app', 'com.example.app', 'production', 'Production', 'World', 'host/1/1', 'd')
            """)
        func answer(_ call: String) throws -> String? { try owner.scalar("SELECT \(call) FROM a") }
        let payload = #"'{"aps":{"alert":"x"}}'"#
        #expect(try answer("tokenkeeper.push_type_of(\(payload)::jsonb, topic || '.voip')") == "voip")
        #expect(try answer("tokenkeeper.push_type_of(\(payload)::jsonb, upper(topic) || '.VOIP')") == "alert")
        #expect(try answer("tokenkeeper.is_background_push(\(payload)::jsonb)") == "f")
        #expect(try answer("tokenkeeper.payload_length(\(payload)::jsonb)") == "21")
        let fault = "tokenkeeper.send_fault(%e, %t, \(payload)::jsonb, %k, NULL, NULL, word, NULL, NULL)"
        func faultOf(_ environment: String, _ topic: String, _ kind: String) throws -> String? {
            try answer(
                fault.replacing("%e", with: environment).replacing("%t", with: topic).replacing("%k", with: kind))
        }
        #expect(try faultOf("environment", "other", "'alert'") == nil)
        #expect(try faultOf("environment", "topic", "left(device, 0) || 'alert'") == nil)
        #expect(
            try faultOf("wrong", "topic", "'alert'")
                == "environment is 'Production', expected 'production' or 'sandbox'")
        #expect(
            try faultOf("environment", "topic", "left(device, 0) || 'Alert'")?.hasPrefix("push_type is 'Alert'")
                == true)
        #expect(try faultOf("environment", "topic || 'ä'", "'alert'")?.hasPrefix("topic has a blank") == true)

        let enqueue = "tokenkeeper.enqueue(\(payload)"
        #expect(try answer("\(enqueue), topic, environment, tags => tags)") == "1")
        #expect(
            try answer(
                "\(enqueue), other, environment, device_id => device, collapse_id => word, idempotency_key => word)")
                == "2")
        #expect(
            try answer(
                "\(enqueue), other, environment, device_id => device, collapse_id => word, idempotency_key => word)")
                == "2")
        #expect(
            try answer("\(enqueue), topic, push_type => left(device, 0) || 'alert', user_id => word)") == "3")
        #expect(try answer("tokenkeeper.audience_size(topic, environment, tags => tags)") == "1")
        #expect(try answer("tokenkeeper.audience_size(topic, environment, device_id => device)") == "1")
        #expect(try answer("tokenkeeper.audience_size(topic, environment, user_id => word)") == "0")
        #expect(throws: DatabaseError.self) {
            try owner.execute("SELECT \(enqueue), upper(topic), environment, everyone => true) FROM a")
        }
        #expect(throws: DatabaseError.self) {
            try owner.execute("SELECT tokenkeeper.enqueue(\(payload), topic, wrong, tags => tags) FROM a")
        }
        try owner.execute(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT topic, 'aa', \(payload) FROM a, generate_series(1, 3)"
        )
        #expect(try answer("tokenkeeper.pause_sending(topic, environment, word)") == "t")
        #expect(try answer("tokenkeeper.pause_sending(other, environment, word)") == "f")
        let claim =
            "(SELECT count(c.request_id) FROM tokenkeeper.claim_requests(environment, %t, word, 100, 3, '-infinity') AS c)"
        #expect(try answer(claim.replacing("%t", with: "topic")) == "0", "it is paused")
        #expect(try answer("tokenkeeper.resume_sending(upper(topic), environment)") == "f")
        #expect(try answer("tokenkeeper.resume_sending(topic, environment)") == "t")
        #expect(try answer(claim.replacing("%t", with: "upper(topic)")) == "0")
        #expect(try answer(claim.replacing("%t", with: "topic")) == "3")
        let finish = """
            tokenkeeper.finish_requests(%d, ARRAY(
                SELECT ROW(r.request_id, left(device, 0) || (ARRAY['answered', 'later', 'failed'])[r.n], (ARRAY[200, 503, 413])[r.n], word, word, now(), 0, word,
                           NULL)::tokenkeeper.request_ending
                FROM (SELECT s.request_id, row_number() OVER (ORDER BY s.request_id) AS n FROM tokenkeeper.send_request AS s) AS r))
            """
        #expect(try answer(finish.replacing("%d", with: "upper(word)")) == "0", "another daemon")
        #expect(try answer(finish.replacing("%d", with: "word")) == "3")
        #expect(
            try count("send_result") == 3 && count("failed_send") == 1 && count("send_request", "attempts = 1") == 1)
    }

    // Payloads ---------------------------------------------------------------------------------------------------------

    private static let escape = "payload has an escape that is not a character"

    @Test(arguments: [
        (#"{"alert":"\\u0000"}"#, escape), (#"{"\\u0000":1}"#, escape), (#"{"alert":"\\ud83d"}"#, escape),
        (#"{"alert":"\\ude00"}"#, escape), (#"{"alert":"\\ude00\\ud83d"}"#, escape),
        (#"{"alert":"\\ud83d\\u0041"}"#, escape),
        (#"{"badge":1e131072}"#, "payload has a number that is too large"),
        (#"{"badge":1e-99999}"#, "payload has a number that is too large or too precise"),
        (#"{"a":"# + String(repeating: " ", count: 66_000) + "1}", "payload is 66007 bytes long as written"),
        (String(repeating: "[", count: 2000) + String(repeating: "]", count: 2000), "payload is a JSON array"),
        ("null", "payload is a JSON null"),
    ])
    func `a JSON payload that cannot be sent fails alone, with a clear error`(spelling: String, complaint: String)
        throws
    {
        let payload = "replace('\(spelling)', '\\\\', '\\')::json"
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')")
        let refused = try refusal("SELECT tokenkeeper.enqueue(\(payload), 'com.example.app', everyone => true)")
        #expect(refused.state == "22023" && refused.message.contains(complaint), "\(refused)")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            VALUES ('com.example.app', 'ab', '{"aps":{"alert":"x"}}'), ('com.example.app', 'aa', \(payload)), ('com.example.app', 'ac', '{"a":1}')
            """, user: "a_sender")
        let claim = try claim()
        #expect(claim.requests.count == 2 && claim.failed == 1)
        #expect(try database.psql("SELECT error FROM tokenkeeper.failed_send").contains(complaint))
        #expect(
            try database.psql("SELECT payload::text = \(payload)::text FROM tokenkeeper.failed_send") == "t",
            "kept as it came")
        // Requeued, it fails again and delays nothing.
        try database.psql("SELECT tokenkeeper.requeue_failed()", user: "a_operator")
        #expect(try self.claim().failed == 1)
    }

    @Test func `a payload is sent in its shortest form`() throws {
        try database.psql(
            #"""
            INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES
                ('com.example.app', 'aa', E'{ "b" :\t[ 1 , 2 ] ,\n"a": "x, y: z" , "a" : "\\ud83d\\ude00 \\u00e4, b: c" }'),
                ('com.example.app', 'ab', format('{"a" : "%s"}', repeat('\u00e4', 2000))::json)
            """#, user: "a_sender")
        let claimed = try claim().requests
        #expect(
            claimed.map { String(decoding: $0.request.payload, as: UTF8.self) } == [
                "{\"a\":\"\u{1F600} ä, b: c\",\"b\":[1,2]}", "{\"a\":\"\(String(repeating: "ä", count: 2000))\"}",
            ], "a large one, too")
    }

    // Lengths and instants ---------------------------------------------------------------------------------------------

    @Test(arguments: [
        ("device_id => repeat('x', 513)", "device_id is 513 bytes long"),
        ("user_id => ''", "user_id is 0 bytes long"),
        ("tags => 'a && '", "tag expression"),
        ("everyone => true, name => repeat('x', 201)", "name is 201 bytes long"),
        ("everyone => true, idempotency_key => ''", "idempotency_key is 0 bytes long"),
        ("everyone => true, max_per_second => 0", "max_per_second is 0, expected 1 to 1000000"),
        ("everyone => true, expiration => '2020-01-01Z'", "expiration has passed"),
        ("everyone => true, scheduled_at => 'infinity'", "scheduled_at is infinite"),
        ("tokens => '{aa,xx,yyy}'", "2 of 3 tokens cannot be read, such as number 2: token is 'xx' (2 characters)"),
        ("tokens => '{aa,null}'", "a token is null"),
        ("tokens => '{aa}', everyone => true", "addressed is more than one"),
        ("everyone => false", "addressed is nobody"),
        ("device_id => NULL, tags => NULL", "addressed is nobody"),
        ("everyone => true, topic => 'com.example.typo'", "topic 'com.example.typo' is not known"),
        (
            "everyone => true, expiration => '2030-01-01Z', scheduled_at => '2030-01-02Z'",
            "expiration is not later than scheduled_at"
        ),
        (
            "everyone => true, expiration => '2030-01-01Z', scheduled_at => '2030-01-01Z'",
            "expiration is not later than scheduled_at"
        ),
        ("everyone => true, environment => repeat('x', 5000)", "environment is"),
        ("everyone => true, topic => repeat('x', 513)", "513 bytes long, expected at most 512"),
    ])
    func `enqueue refuses overlong texts, and requests that expire before they may be sent`(
        arguments: String, complaint: String
    ) throws {
        let topic = arguments.contains("topic =>") ? "" : ", topic => 'com.example.app'"
        let refused = try refusal("SELECT tokenkeeper.enqueue(payload => '{}'\(topic), \(arguments))")
        #expect(refused.state == "22023" && refused.message.contains(complaint), "\(refused)")
    }

    @Test func `a tag of 512 bytes and an expiration after scheduled_at are accepted`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app', tags => ARRAY[repeat('x', 512)])")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.enqueue('{}', 'com.example.app', tags => repeat('x', 512), scheduled_at => '2030-01-01Z', expiration => '2030-01-02Z')",
                user: "a_sender") == "1")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.enqueue('{}', 'com.example.app', everyone => true, scheduled_at => '2030-01-01Z', expiration => 'epoch')",
                user: "a_sender") == "2", "0 is once only, and no instant")
    }

    @Test
    func `a request that expires before its scheduled_at fails, unless a daemon delayed it`()
        throws
    {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, expiration, scheduled_at)
            VALUES ('com.example.app', 'aa', '{}', now() - interval '2 hours', now() - interval '1 hour'),
                   ('com.example.app', 'ab', '{}', now() + interval '1 hour', now() - interval '2 hours'),
                   ('com.example.app', 'ac', '{}', now() - interval '1 hour', now() - interval '2 hours')
            """, user: "a_sender")
        let first = try claim()
        #expect(first.requests.count == 1 && first.failed == 2)
        let errors = "SELECT string_agg(token || ': ' || error, ', ' ORDER BY token) FROM tokenkeeper.failed_send"
        let expired = "its expiration passed before it could be sent"
        let wrong = "expiration is not later than scheduled_at: the request would expire before it may be sent"
        #expect(try database.psql(errors) == "aa: \(wrong), ac: \(expired)")
        // The next try would be after its expiration.
        var daemon = try database.connect(user: "a_daemon")
        _ = try outbox.finish(
            first.requests.map { RequestEnding(number: $0.number, fate: .returned(.zero)) }, on: &daemon)
        try database.psql(
            "UPDATE tokenkeeper.send_request SET expiration = now() - interval '2 hours', scheduled_at = now() - interval '1 hour'"
        )
        #expect(try claim().failed == 1)
        #expect(try database.psql(errors) == "aa: \(wrong), ab: \(expired), ac: \(expired)")
    }

    /// Topic, push type, payload, and what is said; nil if APNs and the device do what is meant.
    private static let pushes: [(String, String?, String, String?)] = [
        ("com.example.app", nil, #"{"aps":{"content-available":true}}"#, "content-available is true, expected 1"),
        ("com.example.app", nil, #"{"aps":{"content-available":"1"}}"#, #"content-available is "1", expected 1"#),
        ("com.example.app", nil, #"{"aps":{"content-available":0,"alert":"x"}}"#, nil),
        ("com.example.app", nil, #"{"aps":{"content_available":1}}"#, "a similar key: expected content-available"),
        ("com.example.app", nil, #"{"aps":{"content-available":1}}"#, nil),
        ("com.example.app", "background", #"{"aps":{"content-available":1,"alert":null}}"#, nil),
        ("com.example.app", "alert", #"{"aps":{"content-available":1,"alert":null}}"#, "alert is null"),
        ("com.example.app", nil, #"{"aps":{"alert":null}}"#, "alert is null, expected a text or a dictionary"),
        ("com.example.app", nil, #"{"aps":{"alert":""}}"#, #"alert is "", expected a text or a dictionary"#),
        ("com.example.app", nil, #"{"aps":{"alert":{}}}"#, "alert is {}, expected a text or a dictionary"),
        ("com.example.app", nil, #"{"aps":{"alert":"","badge":3}}"#, nil),
        ("com.example.app", nil, #"{"aps":{}}"#, nil),
        ("com.example.app", nil, #"{"aps":7}"#, "aps is a JSON number, expected an object"),
        ("com.example.app", nil, #"{"aps":"{\"alert\":\"Hi\"}"}"#, "aps is a JSON string, expected an object"),
        (
            "com.example.app", nil, #"{"alert":"Hi"}"#,
            "payload has alert or content-available outside aps"
        ),
        ("com.example.app", nil, #"{"aps":{"sound":"x"},"content-available":1}"#, "content-available outside aps"),
        (
            "com.example.app", nil, #"{"notification":{"title":"Hi"}}"#,
            "payload has no aps, expected what APNs gets"
        ),
        ("com.example.app", nil, #"{"APS":{"alert":"Hi"}}"#, "payload has no aps, expected what APNs gets"),
        ("com.example.app", nil, #"{"to":"x","data":{"a":1}}"#, "payload has no aps, expected what APNs gets"),
        ("com.example.app", nil, #"{"aps":{"badge":1},"alert":"Hi"}"#, "alert or content-available outside aps"),
        ("com.example.app", nil, #"{"aps":{"content-available":1},"alert":"Hi"}"#, nil),
        ("com.example.app", nil, #"{"aps":{"alert":"Hi"},"alert":"Hi","data":1}"#, nil),
        ("com.example.app", nil, #"{"aps":{"alert":{"title":"","body":""}}}"#, "alert has an empty title and body"),
        ("com.example.app", nil, #"{"aps":{"alert":{"title":"","body":""},"sound":"s"}}"#, nil),
        // The alert is shown, without what the device cannot read.
        ("com.example.app", nil, #"{"aps":{"alert":"Hi","mutable-content":"1","sound":true,"thread-id":5}}"#, nil),
        ("com.example.app", nil, #"{"aps":{"alert":"Hi","badge":"1","interruption-level":null}}"#, nil),
        ("com.example.app", nil, #"{"aps":{"alert":"Hi"},"content-available":1}"#, nil),
        ("com.example.app", nil, #"{"aps":{"alert":{"launch-image":"x"},"badge":1}}"#, nil),
        ("com.example.app", "alert", #"{"aps":{"alert":"","content-available":1}}"#, nil),
        ("com.example.app", nil, #"{"aps":{"Alert":"Hi"}}"#, "aps has a key that devices ignore"),
        ("com.example.app", nil, #"{"aps":{"alert":"Hi","mutable_content":1}}"#, "aps has a key that devices ignore"),
        ("com.example.app", nil, #"{"aps":{"badge":"1"}}"#, #"badge is "1", expected a number"#),
        (
            "com.example.app", nil, #"{"aps":{"alert":"Hi","interruption-level":"timeSensitive"}}"#,
            "interruption-level is"
        ),
        (
            "com.example.app", nil, #"{"aps":{"alert":5}}"#,
            "alert is 5, expected a text, or a dictionary with title or body"
        ),
        ("com.example.app", nil, #"{"aps":{"alert":["x"]}}"#, "expected a text, or a dictionary with title or body"),
        (
            "com.example.app", nil, #"{"aps":{"alert":{"text":"x"}}}"#,
            "expected a text, or a dictionary with title or body"
        ),
        (
            "com.example.app", nil,
            #"{"aps":{"alert":{"loc-key":"GAME"},"mutable-content":1,"interruption-level":"active"}}"#, nil
        ),
        ("com.example.app", nil, #"{"aps":{"mutable-content":1}}"#, "aps has no alert, sound or badge"),
        ("com.example.app", nil, #"{"aps":{"badge":0}}"#, nil),
        ("com.example.app", "mdm", #"{"mdm":"x"}"#, "expected mdm for com.apple.mgmt.* and only there"),
        ("com.apple.mgmt.External.1", nil, #"{"mdm":"x"}"#, nil),
        (
            "com.apple.mgmt.External.1", nil, #"{"aps":{"alert":"Hi"}}"#,
            "expected mdm for com.apple.mgmt.* and only there"
        ),
        ("com.example.app.push-type.liveactivity", nil, #"{"aps":{"alert":"Hi"}}"#, "event is missing"),
        (
            "com.example.app.push-type.liveactivity", nil,
            #"{"aps":{"event":"update","timestamp":1794000000000,"content-state":{}}}"#, "expected seconds since 1970"
        ),
        (
            "com.example.app.push-type.liveactivity", nil, #"{"aps":{"event":"update","timestamp":1794000000}}"#,
            "content-state is missing"
        ),
        (
            "com.example.app.push-type.liveactivity", nil,
            #"{"aps":{"event":"start","timestamp":1794000000,"content-state":{}}}"#, "expected attributes-type"
        ),
        ("com.example.app.push-type.liveactivity", nil, #"{"aps":{"event":"end","timestamp":1794000000}}"#, nil),
        ("com.example.app.voip", nil, #"{"alert":"Hi"}"#, nil),
        ("com.example.app", "voip", #"{"aps":{"alert":"x"}}"#, "push_type is voip, expected the topic to end in .voip"),
        ("com.example.app", "liveactivity", "{}", "expected the topic to end in .push-type.liveactivity"),
        ("com.example.app", "location", "{}", "expected the topic to end in .location-query"),
        (
            "com.example.app.voip", "alert", #"{"aps":{"alert":"x"}}"#,
            "push_type is alert, expected voip for the topic com.example.app.voip"
        ),
        ("com.example.app.voip", nil, "{}", nil), ("com.example.app.voip", "voip", "{}", nil),
        ("com.example.app.voip-ptt", "pushtotalk", "{}", nil),
        ("pass.com.example.card", nil, "{}", nil), ("pass.com.example.card", nil, #"{"aps":[]}"#, nil),
        ("pass.com.example.card", "background", "{}", nil),
        ("pass.com.example.card", "alert", "{}", nil),
        ("com.example.app", "background", "{}", "push_type is background, expected a payload with content-available 1"),
    ]

    @Test(arguments: pushes.indices)
    func `a push that APNs refuses or devices ignore is refused with what helps`(number: Int) throws {
        let (topic, pushType, payload, complaint) = Self.pushes[number]
        let type = pushType.map { "'\($0)'" } ?? "NULL"
        try database.psql("SELECT tokenkeeper.register('aa', '\(topic)')")
        let call = "SELECT tokenkeeper.enqueue('\(payload)', '\(topic)', everyone => true, push_type => \(type))"
        if let complaint {
            let refused = try refusal(call)
            #expect(refused.state == "22023" && refused.message.contains(complaint), "\(refused)")
        } else {
            #expect(try database.psql(call, user: "a_sender") == "1")
        }
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload, push_type) VALUES ('\(topic)', 'aa', '\(payload)', \(type))",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let claim = try outbox.claim(
            .init(environment: "production", topic: topic), most: 9, backgroundPerHour: 0, on: &daemon)
        #expect(claim.requests.count == (complaint == nil ? 1 : 0))
        let error = try database.psql("SELECT error FROM tokenkeeper.failed_send")
        #expect(complaint.map(error.contains) ?? (error == ""), "\(error)")
    }

    @Test func `a call that names no expiration has half a minute, and an alert has what APNs gives it`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at, scheduled_at, expiration)
            VALUES ('com.example.app.voip', 'a1', '{}', now(), NULL, NULL),
                   ('com.example.app.voip', 'a2', '{}', now() - interval '1 hour', NULL, NULL),
                   ('com.example.app.voip', 'a3', '{}', now() - interval '1 hour', now() - interval '1 second', NULL),
                   ('com.example.app.voip', 'a4', '{}', now() - interval '1 hour', NULL, now() + interval '1 hour'),
                   ('com.example.app', 'a5', '{}', now() - interval '1 hour', NULL, NULL)
            """, user: "owner")
        var daemon = try database.connect(user: "a_daemon")
        let calls = try outbox.claim(
            .init(environment: "production", topic: "com.example.app.voip"), most: 9, backgroundPerHour: 0, on: &daemon)
        let now = Instant.now.microseconds / 1_000_000
        let left = Dictionary(
            uniqueKeysWithValues: calls.requests.map {
                ("\($0.request.address.token)", ($0.request.expiration ?? 0) - now)
            })
        #expect(left.count == 3 && calls.failed == 1, "\(left)")
        #expect(left.values.sorted().prefix(2).allSatisfy { 20...31 ~= $0 } && left.values.max()! > 3000, "\(left)")
        #expect(
            try database.psql("SELECT token || ' ' || error FROM tokenkeeper.failed_send")
                == "a2 its expiration passed before it could be sent")
        let alerts = try outbox.claim(scope, most: 9, backgroundPerHour: 0, on: &daemon)
        #expect(alerts.requests.map(\.request.expiration) == [nil])
    }

    @Test func `pause_sending refuses texts that are too long`() throws {
        for wrong in ["repeat('x', 513)", "repeat('x', 5000)", "'t', 'production', repeat('x', 1001)"] {
            let refused = try refusal("SELECT tokenkeeper.pause_sending(\(wrong))", user: "a_operator")
            #expect(refused.state == "22023" && refused.message.contains("bytes long"), "\(refused)")
        }
        #expect(try database.psql("SELECT tokenkeeper.resume_sending(repeat('x', 100000))", user: "a_operator") == "f")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.operation") == "0")
    }

    // Anything ---------------------------------------------------------------------------------------------------------

    /// Input that PostgreSQL itself refuses, and our own 22023.
    private static let documented: Set<String> = ["22023", "22021", "22P02", "22P05", "22003", "22007", "22008"]

    @Test func `any input gets an answer or a documented error`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        try database.psql(
            "SELECT tokenkeeper.register('aa', t, tags => '{World}', device_id => 'd') FROM unnest('{com.example.app,com.example.app.voip,t}'::text[]) AS t"
        )
        let functions: [(user: String, name: String, parameters: [String])] = [
            (
                "a_sender", "enqueue",
                [
                    "payload", "topic", "environment", "tags", "push_type", "priority", "expiration", "collapse_id",
                    "scheduled_at", "device_id", "everyone", "name",
                ]
            ),
            ("a_operator", "pause_sending", ["topic", "environment", "reason"]),
            ("a_operator", "resume_sending", ["topic", "environment"]),
        ]
        var answered: [String: Int] = [:]
        var refused: Set<String> = []
        for function in functions {
            var connection = try database.connect(user: function.user)
            for _ in 0..<4000 {
                let arguments = function.parameters.compactMap { name -> String? in
                    if name != "payload", name != "topic", chance.dice(10) < 7 { return nil }
                    return "\(name) => \(Self.literal(name, &chance))"
                }
                let call = "SELECT tokenkeeper.\(function.name)(\(arguments.joined(separator: ", ")))"
                do {
                    try connection.execute(call)
                    answered[function.name, default: 0] += 1
                } catch let error as DatabaseError {
                    refused.insert(error.sqlState ?? "")
                    #expect(Self.documented.contains(error.sqlState ?? ""), "seed \(seed): \(call): \(error)")
                }
            }
        }
        #expect(answered.count == 3 && answered.values.allSatisfy { $0 > 10 }, "\(answered)")
        #expect(refused.isSuperset(of: ["22023", "22021", "22P02", "22007"]), "\(refused)")
        // Everything that was accepted can be addressed and claimed.
        try database.psql("DELETE FROM tokenkeeper.paused_topic")
        try database.psql(
            "SELECT tokenkeeper.address_campaign(d.campaign_id, 100) FROM tokenkeeper.campaigns_due() AS d",
            user: "a_daemon")
        try database.psql(
            "SELECT count(*) FROM tokenkeeper.campaigns_due() AS d, tokenkeeper.claim_campaign(d.campaign_id, 'd', 100, 3)",
            user: "a_daemon")
        #expect(try count("campaign", "state = 'waiting' AND coalesce(scheduled_at, '-infinity') < now()") == 0)
    }

    private static func literal(_ name: String, _ chance: inout SeededChance) -> String {
        let usual: [String: [String]] = [
            "payload": [
                #"{"aps":{"alert":"x"}}"#, #"{"a":"\u0000"}"#, #"{"a":1e999999}"#, "[", "1e400000", #"{"mdm":1}"#,
            ],
            "topic": ["com.example.app", "com.example.app.voip", "t"], "environment": ["production", "sandbox"],
            "tags": ["World", "a && !b", "(a || \"b c\")", "a &&"], "push_type": ["alert", "background"],
            "priority": ["10", "-1", "99999999999", "1e3"], "collapse_id": ["c", " c"],
            "expiration": ["epoch", "infinity", "2040-01-01Z", "294277-01-01Z", "yesterday-ish"],
            "scheduled_at": ["-infinity", "now", "2041-01-01Z", "4714-01-01Z BC"], "device_id": ["d"],
            "everyone": ["true", "maybe"], "reason": ["why"],
        ]
        switch Int.random(in: 0..<10, using: &chance) {
        case 0: return "NULL"
        case 1:
            let bytes = (0..<Int.random(in: 0...20, using: &chance)).map { _ in
                UInt8.random(in: 0...255, using: &chance)
            }
            return "E'" + bytes.map { "\\x" + ($0 < 16 ? "0" : "") + String($0, radix: 16) }.joined() + "'"
        case 2: return "repeat('x', \([511, 512, 513, 3000, 70_000].randomElement(using: &chance)!))::\(type(of: name))"
        // Not negative: PostgreSQL reads a minus sign in a timestamp as a time zone, and refuses it with 22009.
        case 3: return "'\(Int64.random(in: 0 ... .max, using: &chance))'"
        default: return "'\((usual[name] ?? ["x"]).randomElement(using: &chance)!)'"
        }
    }

    private static func type(of parameter: String) -> String {
        switch parameter {
        case "payload": "json"
        case "priority": "integer"
        case "expiration", "scheduled_at": "timestamptz"
        case "everyone": "boolean"
        default: "text"
        }
    }
}
