import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `The outbox` {
    let database: TestDatabase
    let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
    let scope = TopicScope(environment: "production", topic: "com.example.app")

    init() throws {
        database = try TestCluster.shared.database()
        try database.addQueueFunction()
    }

    /// A token that contains its number.
    private static func token(_ number: Int) -> String { String(format: "%064x", number) }

    private func register(_ numbers: ClosedRange<Int>, tags: String = "{World}") throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 'com.example.app', device_id => 'd' || i, tags => '\(tags)')) "
                + "FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS i", user: "a_app")
    }

    /// Queues a single request for each sendable token of an audience.
    ///
    /// - Returns: How many.
    @discardableResult
    private func queue(_ arguments: String = "tags => '{World}'", payload: String = #"{"aps":{"alert":"Hello"}}"#)
        throws -> String
    {
        try database.psql(
            "SELECT public.queue('\(payload)', 'com.example.app', \(arguments))", user: "a_sender")
    }

    private func claim(_ most: Int = 100, backgroundPerHour: Int = 3, by outbox: Outbox? = nil) throws
        -> [ClaimedRequest]
    {
        var daemon = try database.connect(user: "a_daemon")
        return try (outbox ?? self.outbox).claim(
            scope, most: most, backgroundPerHour: backgroundPerHour, on: &daemon
        ).requests
    }

    private func finish(_ endings: [RequestEnding], by outbox: Outbox? = nil) throws -> Int {
        var daemon = try database.connect(user: "a_daemon")
        return try (outbox ?? self.outbox).finish(endings, on: &daemon).requests
    }

    private func count(_ table: String, _ condition: String = "true") throws -> Int {
        Int(try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")) ?? -1
    }

    // Several topics at once -------------------------------------------------------------------------------------------

    @Test func `several topics are claimed at once, each as far as is asked`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, environment, token, payload)
            SELECT t.topic, t.environment, lpad(to_hex(i), 64, '0'), '{"aps":{"alert":"x"}}'
            FROM (VALUES ('a', 'production', 3), ('b', 'production', 5), ('a', 'sandbox', 1)) AS t (topic, environment, requests)
            CROSS JOIN LATERAL generate_series(1, t.requests) AS i
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        func scope(_ topic: String, _ environment: String = "production") -> TopicScope {
            TopicScope(environment: environment, topic: topic)
        }
        let asked: [Outbox.Asked] = [
            .init(scope("c"), most: 9), .init(scope("b"), most: 2), .init(scope("a"), most: 9),
            .init(scope("a", "sandbox"), most: 1),
        ]
        let claims = try outbox.claim(asked, backgroundPerHour: 3, on: &daemon)
        #expect(claims.map(\.requests.count) == [0, 2, 3, 1])
        #expect(claims.map(\.isComplete) == [true, false, true, false])
        #expect(claims.map { $0.dueAt == nil } == [true, false, false, false])
        for (asked, claim) in zip(asked, claims) {
            #expect(claim.requests.allSatisfy { $0.request.address.scope == asked.scope && $0.sendAt == nil })
        }
        let again = try outbox.claim(asked, backgroundPerHour: 3, on: &daemon)
        #expect(again.map(\.requests.count) == [0, 2, 0, 0])
        #expect(Set((claims + again).flatMap(\.requests).map(\.number)).count == 8)
    }

    // What is refused -----------------------------------------------------------------------------------------------

    static let faulty = [
        (#"{"aps":{"alert":"x"}}"#, "push_type => 'background'", "expected a payload with content-available 1"),
        (#"{"aps":{"content-available":1}}"#, "push_type => 'alert'", "expected background"),
        (#"{"aps":{"content-available":1}}"#, "priority => 10", "expected 5 for a background push"),
        (#"{"aps":{"alert":"x"}}"#, "push_type => 'shout'", "push_type is 'shout'"),
        (#"{"aps":{"alert":"x"}}"#, "priority => 7", "priority is 7"),
        (#"{"aps":{"alert":"x"}}"#, "collapse_id => ''", "collapse_id is 0 bytes long"),
        (#"{"aps":{"alert":"x"}}"#, "collapse_id => repeat('x', 65)", "collapse_id is 65 bytes long"),
        (#"{"aps":{"alert":"x"}}"#, "collapse_id => E'a\\nb'", "no header can carry"),
        (#"{"aps":{"alert":"x"}}"#, "expiration => 'infinity'", "expiration is infinite"),
        (#"{"aps":{"alert":"x"}}"#, "environment => 'staging'", "environment is 'staging'"),
        ("[1]", "priority => 5", "payload is a JSON array"),
        (
            #"{"aps":{"alert":""# + String(repeating: "x", count: 4096) + #""}}"#, "priority => 5",
            "payload is over 4096 bytes"
        ),
    ]

    @Test(arguments: faulty)
    func `enqueue refuses what APNs would refuse, and the claim fails it`(
        payload: String, argument: String, complaint: String
    ) throws {
        try register(1...1)
        let failure = #expect(throws: TestFailure.self) {
            try database.psql(
                "SELECT tokenkeeper.enqueue('\(payload)', 'com.example.app', tags => 'World', \(argument))",
                user: "a_sender")
        }
        #expect(failure?.description.contains(complaint) == true, "\(failure?.description ?? "")")
        let (column, value) = (argument.components(separatedBy: " => ")[0], argument.components(separatedBy: " => ")[1])
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload, \(column)) VALUES ('com.example.app', 'aa', '\(payload)', \(value))",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let scope = try #require(try outbox.scopes(on: &daemon).due.first)
        #expect(try outbox.claim(scope, most: 10, backgroundPerHour: 3, on: &daemon).requests == [])
        #expect(try database.psql("SELECT error FROM tokenkeeper.failed_send").contains(complaint))
        #expect(try count("send_request") == 0)
    }

    @Test func `the claim and the client agree on what is valid`() throws {
        try database.psql(
            #"""
            INSERT INTO tokenkeeper.send_request (topic, token, payload, push_type, priority, expiration, collapse_id)
            SELECT t, md5(concat_ws('|', t, p, k, n, e, c)), p::jsonb, k, n, e::timestamptz, c
            FROM unnest(ARRAY['com.example.app', 'com.example.app.voip', 'com example', 'com.exämple', '', repeat('x', 512), repeat('x', 513)]) AS t,
                 unnest(ARRAY['{"aps":{"alert":"x"}}', '{"aps":{"content-available":1}}', '{}', format('{"a":"%s"}', repeat('y', 4088)),
                              format('{"a":"%s"}', repeat('y', 4089)), format('{"a":"%s"}', repeat('y', 5113))]) AS p,
                 unnest(ARRAY[NULL, 'alert', 'background', 'voip', 'shout']) AS k,
                 unnest(ARRAY[NULL, 10, 5, 1, 0, 7, -5]) AS n,
                 unnest(ARRAY[NULL, 'epoch', 'infinity', '1969-12-31Z', '2040-01-01Z']) AS e,
                 unnest(ARRAY[NULL, '', 'c', 'c d', ' c', 'c ', 'ä', E'c\n', repeat('c', 64), repeat('c', 65)]) AS c
            WHERE hashtext(concat_ws('|', t, p, k, n, e, c)) % 7 = 0
            """#, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        var claimed: [ClaimedRequest] = []
        var scopes = try outbox.scopes(on: &daemon).due
        while let scope = scopes.popLast() {
            while true {
                let claim = try outbox.claim(scope, most: 1000, backgroundPerHour: 0, on: &daemon)
                if claim.dueAt == nil { break }
                claimed += claim.requests
            }
        }
        #expect(claimed.count > 100 && claimed.allSatisfy { $0.request.fault == nil })
        #expect(Set(claimed.map(\.request.pushType)) == [.alert, .background, .voip])
        #expect(try count("send_request", "claimed_by IS NULL") == 0 && count("failed_send") > 5000)
    }

    @Test func `garbage never fails a sender's batch and stays unchanged`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (environment, topic, token, payload)
            VALUES (NULL, NULL, NULL, NULL), ('moon', 'com.example.app', 'aa', '{}'), (NULL, 'com.example.app', 'no hex', '{"a":1}'),
                   (NULL, 'com.example.app', NULL, '{}'), (NULL, 'com.example.app', 'aa', NULL), (NULL, 'com.example.app', 'aa', '"x"')
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        for scope in try outbox.scopes(on: &daemon).due {
            #expect(try outbox.claim(scope, most: 10, backgroundPerHour: 3, on: &daemon).requests == [])
        }
        var owner = try database.connect()
        #expect(
            try owner.lines("SELECT error FROM tokenkeeper.failed_send ORDER BY request_id", columns: 1) == [
                "token is null, expected 1 to 512 bytes in hex",
                "environment is 'moon', expected 'production' or 'sandbox'",
                "token is 'no hex' (6 characters), expected 1 to 512 bytes in hex",
                "token is null, expected 1 to 512 bytes in hex",
                "payload is missing, expected a JSON object",
                "payload is a JSON string, expected an object",
            ])
        #expect(try count("send_request") == 0)
    }

    @Test(arguments: [
        ("com.example.app", #"{"aps":{"alert":"x"}}"#, "alert"),
        ("com.example.app", #"{"aps":{"content-available":1},"id":7}"#, "background"),
        ("com.example.app", #"{"aps":{"content-available":1,"badge":0}}"#, "alert"),
        ("com.apple.mgmt.External.1", #"{"mdm":"x"}"#, "mdm"),
        ("com.example.app.voip", #"{"aps":{"content-available":1}}"#, "voip"),
        ("com.example.app.complication", "{}", "complication"),
        ("com.example.app.pushkit.fileprovider", "{}", "fileprovider"),
        (
            "com.example.app.push-type.liveactivity", #"{"aps":{"event":"end","timestamp":1794000000}}"#, "liveactivity"
        ),
        ("com.example.app.push-type.widgets", "{}", "widgets"),
        ("com.example.app.push-type.controls", "{}", "controls"),
        ("com.example.app.location-query", "{}", "location"), ("com.example.app.voip-ptt", "{}", "pushtotalk"),
    ])
    func `a request without a push type gets it from its topic or payload`(
        topic: String, payload: String, type: String
    ) throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(topic)', 'AB', '\(payload)')",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let claimed = try outbox.claim(
            TopicScope(environment: "production", topic: topic), most: 1, backgroundPerHour: 3, on: &daemon
        ).requests
        #expect(claimed.first?.request.pushType.rawValue == type)
        #expect(claimed.first?.request.priority == (type == "background" ? 5 : nil))
        #expect(claimed.first?.request.address.token == DeviceToken(hex: "ab"))
    }

    // The gate ---------------------------------------------------------------------------------------------------------

    @Test func `a token that becomes stale suppresses its waiting requests, and a registration allows new ones`()
        throws
    {
        try register(1...3)
        try queue()
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at) VALUES ('com.example.app', '\(Self.token(2))', 410, "
                + "'{\"reason\":\"Unregistered\",\"timestamp\":' || (extract(epoch FROM clock_timestamp()) * 1000)::bigint || '}', clock_timestamp())",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try claim().map(\.request.address.token.bytes.last) == [1, 3])
        #expect(
            try database.psql(
                "SELECT state, reason, token, invalidated_at IS NOT NULL, push_type, apns_id IS NOT NULL FROM tokenkeeper.suppressed_send",
                user: "a_reader") == "stale|Unregistered|\(Self.token(2))|t|alert|t")
        #expect(try queue() == "2")
        try register(2...2)
        #expect(try queue() == "3")
        #expect(try claim().count == 5)
    }

    @Test func `every suppressing state is reported, and an observing gate suppresses nothing`() throws {
        try register(1...4)
        try queue()
        try database.psql("SELECT tokenkeeper.unregister('\(Self.token(1))', 'com.example.app')")
        try database.psql("SELECT tokenkeeper.register('abcd', 'com.example.app', device_id => 'd2')")
        #expect(try claim().count == 2)
        #expect(
            try database.psql(
                "SELECT string_agg(state || ': ' || reason, ', ' ORDER BY state) FROM tokenkeeper.suppressed_send")
                == "superseded: a newer token of the same device, unregistered_by_app: unregistered by the app")
        try database.psql("UPDATE tokenkeeper.topic_policy SET gate = 'observe'", user: "a_operator")
        #expect(try queue() == "5")
        #expect(try claim().count == 5)
    }

    // Claims and endings -----------------------------------------------------------------------------------------------

    @Test func `no two daemons claim the same request; the oldest goes first; scheduled_at is kept`() throws {
        try register(1...10)
        try queue("tags => '{World}', scheduled_at => clock_timestamp() + interval '1 hour'")
        #expect(try claim() == [])
        try queue()
        let other = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(500))
        let (mine, theirs) = (try claim(4), try claim(100, by: other))
        #expect(mine.count == 4 && theirs.count == 6)
        #expect(Set(mine.map(\.number)).isDisjoint(with: theirs.map(\.number)))
        #expect(mine.map(\.number).max()! < theirs.map(\.number).min()!)
        #expect(
            try finish(theirs.map { RequestEnding(number: $0.number, fate: .answered) }) == 0,
            "they are not in this hand")
        #expect(try count("send_request", "claimed_by IS NOT NULL") == 10)
    }

    @Test func `answered and failed requests leave, others wait again, and responses become results`() throws {
        try register(1...5)
        try queue("tags => '{World}', priority => 5, collapse_id => 'c', expiration => '2040-01-01Z'")
        let claimed = try claim()
        #expect(
            claimed.allSatisfy {
                $0.request.priority == 5 && $0.request.collapseID == "c" && $0.request.expiration == 2_208_988_800
            })
        #expect(
            claimed.allSatisfy {
                $0.request.payload == Array(#"{"aps":{"alert":"Hello"}}"#.utf8) && $0.request.fault == nil
            })
        let sentAt = Instant(microseconds: 1_794_000_000_000_000)
        let endings = [
            RequestEnding(number: claimed[0].number, fate: .answered, answer: .init(status: 200), sentAt: sentAt),
            RequestEnding(
                number: claimed[1].number, fate: .answered, answer: .init(status: 410, body: "{}", apnsID: "x"),
                sentAt: sentAt),
            RequestEnding(
                number: claimed[2].number, fate: .failed("too bad"), answer: .init(status: 413), sentAt: sentAt),
            RequestEnding(
                number: claimed[3].number, fate: .later(.seconds(600), "APNs answered 503"), answer: .init(status: 503),
                sentAt: sentAt),
            RequestEnding(number: claimed[4].number, fate: .returned(nil)),
        ]
        #expect(try finish(endings) == 5)
        #expect(try finish(endings) == 0, "a second ending changes nothing")
        #expect(
            try database.psql(
                "SELECT string_agg(status::text, ' ' ORDER BY status) FROM tokenkeeper.send_result WHERE sent_at = '2026-11-06 21:20:00Z'"
            )
                == "200 410 413 503")
        #expect(try database.psql("SELECT apns_id FROM tokenkeeper.send_result WHERE status = '410'") == "x")
        #expect(
            try database.psql("SELECT apns_id FROM tokenkeeper.send_result WHERE status = '200'")
                == claimed[0].request.id
        )
        #expect(
            try database.psql("SELECT error, status, payload, attempts FROM tokenkeeper.failed_send")
                == #"too bad|413|{"aps": {"alert": "Hello"}}|0"#)
        let again = try claim()
        #expect(again.map(\.number) == [claimed[4].number] && again[0].attempts == 0)
        try database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL")
        let later = try claim()
        #expect(later.map(\.number) == [claimed[3].number] && later[0].attempts == 1)
        #expect(later[0].request.id == claimed[3].request.id && later[0].firstSentAt == claimed[3].firstSentAt)
        #expect(try database.psql("SELECT tokenkeeper.requeue_failed()", user: "a_operator") == "1")
        #expect(try claim().map(\.request.id) == [claimed[2].request.id])
    }

    @Test func `each ending costs the same, however much is claimed`() throws {
        var daemon = try database.connect()
        let read = "SELECT pg_stat_get_xact_tuples_returned('tokenkeeper.send_request_claimed'::regclass)"
        try register(1...300)
        try queue()
        try daemon.execute("ANALYZE tokenkeeper.send_request")
        let claimed = try claim(300)
        let before = Int(try daemon.scalar(read) ?? "") ?? -1
        try daemon.execute("BEGIN")
        let fates = "(ARRAY['answered', 'failed', 'later', 'interrupted', 'returned'])[1 + n % 5]"
        try daemon.execute(
            """
            SELECT tokenkeeper.finish_requests('host/1/1', array_agg(
                ROW(r.request_id, \(fates), NULL, NULL, NULL, NULL, 0, NULL, NULL)::tokenkeeper.request_ending))
            FROM (SELECT request_id, row_number() OVER ()::integer AS n FROM tokenkeeper.send_request ORDER BY request_id + 0) AS r
            """)
        let after = Int(try daemon.scalar(read) ?? "") ?? .max
        try daemon.execute("COMMIT")
        #expect(claimed.count == 300 && after - before == 0, "\(after - before) index entries for 300 endings")
        #expect(try count("send_request") == 180)
    }

    @Test func `the claim checks requests without a statement for each`() throws {
        #expect(
            try !database.psql(
                """
                EXPLAIN VERBOSE SELECT tokenkeeper.send_fault(coalesce(environment, 'production'), topic, body, push_type, priority, expiration,
                                                              collapse_id, scheduled_at, body_text)
                FROM (SELECT *, payload::jsonb AS body, payload::text AS body_text FROM tokenkeeper.send_request OFFSET 0) AS r
                """
            ).contains("send_fault("))
    }

    @Test func `a response that the database's encoding cannot hold is still recorded`() throws {
        try register(1...2)
        try queue()
        let claimed = try claim()
        let bodies = ["a\u{0}b", "{\"reason\":\"\u{1F4A9}\"}"]
        #expect(
            try finish(
                zip(claimed, bodies).map {
                    RequestEnding(number: $0.number, fate: .failed("\u{0}"), answer: .init(status: 400, body: $1))
                }) == 2)
        #expect(try count("send_request") == 0 && count("failed_send", "error = '?'") == 2)
        #expect(try count("send_result", "body = 'a?b'") == 1)
    }

    @Test func `after a standstill, a claim has only the requests that nobody has taken over since`() throws {
        try register(1...3)
        try queue()
        let proxy = try CuttingProxy(to: database.cluster.port, seed: 0)
        proxy.behave()
        defer { proxy.close() }
        var outbox = outbox
        outbox.standstill = .zero
        let failures = Failures()
        let (claimer, address) = (outbox, database.url(port: proxy.port, overTCP: true))
        atOnce(2) { [scope, database] thread in
            do {
                if thread == 0 {
                    var daemon = try Connection(to: DatabaseAddress(address), writes: true)
                    proxy.holdReplies(true)
                    let claim = try claimer.claim(scope, most: 10, backgroundPerHour: 0, on: &daemon)
                    if claim.requests.count != 2 { failures.add("\(claim.requests.count) requests instead of 2") }
                    return
                }
                defer { proxy.holdReplies(false) }
                try eventually("the claim is committed") {
                    try database.psql("SELECT count(claimed_by) FROM tokenkeeper.send_request") == "3"
                }
                try database.psql("UPDATE tokenkeeper.send_request SET claimed_by = 'other/1/1' WHERE request_id = 2")
            } catch { failures.add("\(error)") }
        }
        #expect(failures.all == [])
    }

    @Test func `the requests of an ended daemon are taken over, and fail after the second time`()
        throws
    {
        try register(1...1)
        try queue()
        var daemon = try database.connect(user: "a_daemon")
        let gone = Outbox(daemonID: "host/7/1", processScope: "here", lockTimeout: .milliseconds(500))
        try gone.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try claim(by: gone).count == 1)
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 0, "it is alive")
        let elsewhere = Outbox(daemonID: "host/9/1", processScope: "elsewhere", lockTimeout: .milliseconds(500))
        #expect(try elsewhere.takeOver(on: &daemon, isAlive: { _ in false }).requests == 0, "another scope cannot tell")
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in false }).requests == 1)
        #expect(try claim(by: elsewhere).count == 1, "it may be sent a second time")
        #expect(
            try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1,
            "a daemon without a heartbeat has ended")
        #expect(try claim() == [], "not a third time")
        #expect(try database.psql("SELECT error FROM tokenkeeper.failed_send").contains("may have been delivered"))
        #expect(
            try database.psql(
                "SELECT tokenkeeper.requeue_failed(ARRAY(SELECT failed_id FROM tokenkeeper.failed_send))",
                user: "a_operator") == "1")
        #expect(try claim(by: gone).count == 1)
        try gone.signOff(on: &daemon)
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1)
    }

    @Test func `after a standstill, when all heartbeats are old, nobody is taken over before it can beat again`() throws
    {
        try register(1...2)
        try queue()
        var daemon = try database.connect(user: "a_daemon")
        let other = Outbox(daemonID: "host/7/1", processScope: "elsewhere", lockTimeout: .milliseconds(500))
        try other.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try claim(by: other).count == 2)
        let start = ContinuousClock.now
        var silences = SilenceWatch(.production)
        func takenOver(after seconds: Int) throws -> Int {
            try outbox.takeOver(
                on: &daemon, isSilent: { silences.note($0, $1, at: start + .seconds(seconds)) }, isAlive: { _ in true }
            ).requests
        }
        for seconds in [0, 10, 20, 30, 40] {
            #expect(try takenOver(after: seconds) == 0, "its heartbeat is young")
        }
        try database.psql("UPDATE tokenkeeper.sending_daemon SET heartbeat_at = heartbeat_at - interval '100 seconds'")
        for seconds in [140, 150, 160] { #expect(try takenOver(after: seconds) == 0) }
        try other.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try takenOver(after: 170) == 0, "it is back")
        try database.psql("UPDATE tokenkeeper.sending_daemon SET heartbeat_at = heartbeat_at - interval '100 seconds'")
        #expect(try takenOver(after: 180) == 0)
        #expect(try takenOver(after: 195) == 0)
        #expect(try takenOver(after: 210) == 2, "it has not come back")
    }

    @Test func `of an ended daemon, only what it may have sent counts as interrupted`() throws {
        try register(1...4)
        try queue()
        try queue("tags => '{World}', push_type => 'background'", payload: #"{"aps":{"content-available":1}}"#)
        var daemon = try database.connect(user: "a_daemon")
        let gone = Outbox(daemonID: "host/7/1", processScope: "here", lockTimeout: .milliseconds(500))
        try gone.beat(credentials: "[]", trouble: [], on: &daemon)
        let claimed = try claim(by: gone)
        #expect(claimed.count == 8)
        #expect(try database.psql("SELECT sum(cardinality(sent_at)) FROM tokenkeeper.background_send") == "4")
        // One alert, one background push, and one request that the daemon does not have any more.
        let sent: Set = [claimed[0].number, claimed[7].number, 1_000_000]
        let elsewhere = Outbox(daemonID: "host/9/1", processScope: "elsewhere", lockTimeout: .milliseconds(500))
        #expect(
            try elsewhere.takeOver(on: &daemon, isAlive: { _ in false }, sent: { _ in sent }) == .init(), "it is alive")
        let taken = try outbox.takeOver(
            on: &daemon, isAlive: { _ in false }, sent: { $0 == "host/7/1" ? sent : nil })
        #expect(taken == .init(requests: 8, interrupted: 2))
        #expect(
            try count(
                "send_request",
                "claimed_by IS NULL AND interruptions = 1 AND attempts = 1 AND first_sent_at IS NOT NULL AND request_id IN (\(claimed[0].number), \(claimed[7].number))"
            ) == 2)
        #expect(
            try count(
                "send_request",
                "claimed_by IS NULL AND interruptions = 0 AND attempts = 0 AND first_sent_at IS NULL AND scheduled_at IS NULL AND NOT deferred"
            ) == 6)
        #expect(
            try database.psql("SELECT sum(cardinality(sent_at)) FROM tokenkeeper.background_send") == "1",
            "the others have not used their share")
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in false }, sent: { _ in sent }) == .init())
    }

    @Test func `a silent daemon, or one of another process scope, may have sent all that it has claimed`() throws {
        try register(1...1)
        try queue()
        var daemon = try database.connect(user: "a_daemon")
        for (scope, isAlive) in [("here", true), ("elsewhere", false)] {
            let silent = Outbox(daemonID: "host/7/1", processScope: scope, lockTimeout: .milliseconds(500))
            try silent.beat(credentials: "[]", trouble: [], on: &daemon)
            try database.psql("UPDATE tokenkeeper.sending_daemon SET process_scope = '\(scope)'")
            #expect(try claim(by: silent).count == 1)
            try database.psql(
                "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = clock_timestamp() - interval '61 seconds'")
            #expect(
                try outbox.takeOver(on: &daemon, isAlive: { _ in isAlive }, sent: { _ in [] })
                    == .init(requests: 1, interrupted: 1))
        }
    }

    @Test func `a daemon is finished when it has claimed nothing and was silent for a minute`() throws {
        try register(1...1)
        try queue()
        var daemon = try database.connect(user: "a_daemon")
        func finished() throws -> [String] { try outbox.finished(among: ["host/7/1", "host/8/1"], on: &daemon) }
        #expect(try finished() == ["host/7/1", "host/8/1"])
        let gone = Outbox(daemonID: "host/7/1", processScope: "here", lockTimeout: .milliseconds(500))
        try gone.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try finished() == ["host/8/1"], "a claim may not be committed yet")
        let claimed = try claim(by: gone)
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = clock_timestamp() - interval '61 seconds'")
        #expect(try finished() == ["host/8/1"], "it has a request")
        #expect(try finish(claimed.map { RequestEnding(number: $0.number, fate: .returned(nil)) }, by: gone) == 1)
        #expect(try finished() == ["host/7/1", "host/8/1"])
    }

    @Test func `a daemon of another process scope is taken over after a minute of silence`() throws {
        try register(1...1)
        try queue()
        var daemon = try database.connect(user: "a_daemon")
        let gone = Outbox(daemonID: "host/7/1", processScope: "elsewhere", lockTimeout: .milliseconds(500))
        try gone.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try claim(by: gone).count == 1)
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = clock_timestamp() - interval '55 seconds'")
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 0)
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = clock_timestamp() - interval '61 seconds'")
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1)
    }

    @Test func `a paused topic waits until it is resumed, and others do not wait`() throws {
        try register(1...2)
        try queue()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.other', 'aa', '{\"aps\":{\"alert\":\"1\"}}')"
        )
        var daemon = try database.connect(user: "a_daemon")
        for (reason, result) in [("a mistake", "t"), ("again", "f")] {
            #expect(
                try database.psql(
                    "SELECT tokenkeeper.pause_sending('com.example.app', reason => '\(reason)')", user: "a_operator")
                    == result)
        }
        #expect(try outbox.scopes(on: &daemon).due.map(\.topic) == ["com.example.other"])
        let warning = try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status", user: "a_reader")
        #expect(
            warning.contains(
                "a mistake; to go on, run: `SELECT tokenkeeper.resume_sending('com.example.app', 'production')`"
            ))
        #expect(try database.psql("SELECT tokenkeeper.resume_sending('com.example.app')", user: "a_operator") == "t")
        #expect(try database.psql("SELECT tokenkeeper.resume_sending('com.example.app')", user: "a_operator") == "f")
        #expect(try outbox.scopes(on: &daemon).due.count == 2)
        #expect(
            try database.psql("SELECT string_agg(operation, ' ' ORDER BY operation_id) FROM tokenkeeper.operation")
                == "sending_paused sending_resumed sending_resumed", "daemons that pause it see each")
    }

    @Test func `an interrupted request is retried once, or not at all if it allows one try only`() throws {
        try register(1...2)
        try queue("device_id => 'd1'")
        try queue("device_id => 'd2', expiration => 'epoch'")
        let claimed = try claim()
        #expect(
            try finish(claimed.map { RequestEnding(number: $0.number, fate: .interrupted(.zero, "no answer")) }) == 2)
        let again = try claim()
        #expect(again.map(\.number) == [claimed[0].number] && again[0].attempts == 1)
        #expect(try finish([RequestEnding(number: again[0].number, fate: .interrupted(.zero, "no answer"))]) == 1)
        #expect(try claim() == [])
        #expect(
            try database.psql("SELECT error FROM tokenkeeper.failed_send ORDER BY failed_id")
                == "it was interrupted while it was being sent, and its expiration allows only one attempt\n"
                + "it was interrupted twice while it was being sent; it may have been delivered: no answer")
    }

    @Test func `only some of many requests for one token are claimed at a time, and the others block nobody`() throws {
        try register(1...3)
        for number in 1...50 { try queue("device_id => 'd1'", payload: #"{"aps":{"alert":"\#(number)"}}"#) }
        try queue("tags => '{World}'")
        let claimed = try claim(60)
        #expect(claimed.count == 7, "five of one token, and the two others")
        #expect(
            try count("send_request", "scheduled_at > queued_at AND claimed_by IS NULL") == 46,
            "the rest has its turn in a second")
    }

    @Test func `a claim reports how many requests it suppressed and failed, and how far it came`() throws {
        try register(1...4)
        try queue()
        try database.psql("SELECT tokenkeeper.unregister('\(Self.token(2))', 'com.example.app')")
        try database.psql("UPDATE tokenkeeper.send_request SET collapse_id = '' WHERE token = '\(Self.token(3))'")
        var daemon = try database.connect(user: "a_daemon")
        let claim = try outbox.claim(scope, most: 3, backgroundPerHour: 3, on: &daemon)
        #expect(claim.requests.count == 1 && claim.suppressed == 1 && claim.failed == 1)
        let dueAt = try #require(claim.dueAt)
        _ = try finish(claim.requests.map { RequestEnding(number: $0.number, fate: .returned(nil)) })
        let next = try outbox.claim(scope, most: 10, since: dueAt, backgroundPerHour: 3, on: &daemon)
        #expect(next.requests.map(\.request.address.token.bytes.last) == [4], "the returned request was due earlier")
        #expect(try outbox.claim(scope, most: 10, since: dueAt, backgroundPerHour: 3, on: &daemon).dueAt == nil)
        #expect(try self.claim().map(\.request.address.token.bytes.last) == [1])
        #expect(try outbox.claimed(on: &daemon).count == 2)
    }

    @Test func `no text is too long for a sender's batch`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (environment, topic, token, payload) SELECT string_agg(md5(i::text), ''), string_agg(md5(i::text), ''), "
                + "string_agg(md5(i::text), ''), '{}' FROM generate_series(1, 400) AS i", user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        for scope in try outbox.scopes(on: &daemon).due {
            #expect(try outbox.claim(scope, most: 10, backgroundPerHour: 3, on: &daemon).failed == 1)
        }
        #expect(try count("send_request") == 0 && count("failed_send", "length(topic) = 12800") == 1)
    }

    @Test func `thousands of topics are read in pages`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload, scheduled_at) SELECT 't' || i, 'aa', '{}', CASE WHEN i = 7 THEN timestamptz 'infinity' END "
                + "FROM generate_series(1, 450) AS i", user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        var seen: [String] = []
        var parts = 0
        var last: TopicScope?
        repeat {
            let part = try outbox.scopes(after: last, most: 200, on: &daemon)
            seen += part.due.map(\.topic)
            (last, parts) = (part.last, parts + 1)
        } while last != nil
        #expect(parts == 3 && seen.count == 449 && Set(seen).count == 449 && !seen.contains("t7"))
    }

    // Background pushes ------------------------------------------------------------------------------------------------

    @Test func `a device gets three background pushes an hour, and only the newest excess push waits`() throws {
        try register(1...2)
        for number in 1...6 {
            try queue("device_id => 'd1'", payload: #"{"aps":{"content-available":1},"n":\#(number)}"#)
        }
        try queue("device_id => 'd2'", payload: #"{"aps":{"content-available":1}}"#)
        let claimed = try claim()
        #expect(
            claimed.map { String(decoding: $0.request.payload, as: UTF8.self).filter(\.isNumber) } == [
                "11", "21", "31", "1",
            ])
        #expect(try count("suppressed_send", "state = 'background'") == 2)
        #expect(
            try database.psql(
                "SELECT payload -> 'n', scheduled_at BETWEEN now() + interval '59 minutes' AND now() + interval '1 hour' FROM tokenkeeper.send_request WHERE claimed_by IS NULL"
            )
                == "6|t")
        // A later push replaces the one that waits.
        try queue("device_id => 'd1'", payload: #"{"aps":{"content-available":1},"n":7}"#)
        #expect(try claim() == [])
        #expect(
            try database.psql("SELECT payload -> 'n' FROM tokenkeeper.send_request WHERE claimed_by IS NULL") == "7")
        #expect(try count("suppressed_send", "state = 'background'") == 3)
        // An hour later.
        try database.psql(
            "UPDATE tokenkeeper.background_send SET sent_at = ARRAY(SELECT a - interval '1 hour' FROM unnest(sent_at) AS a)"
        )
        try database.psql(
            "UPDATE tokenkeeper.send_request SET scheduled_at = scheduled_at - interval '1 hour' WHERE claimed_by IS NULL"
        )
        #expect(try claim().count == 1)
        #expect(
            try database.psql("SELECT cardinality(sent_at) FROM tokenkeeper.background_send ORDER BY token_key LIMIT 1")
                == "1")
    }

    @Test func `the limit on background pushes can be changed or removed, for all topics or one`() throws {
        try register(1...1)
        func ask(_ requests: Int) throws {
            for _ in 0..<requests { try queue(payload: #"{"aps":{"content-available":1}}"#) }
        }
        try ask(5)
        #expect(try claim(backgroundPerHour: 0).count == 5)
        try database.psql("UPDATE tokenkeeper.topic_policy SET background_per_hour = 1", user: "a_operator")
        try ask(3)
        #expect(try claim(backgroundPerHour: 0).count == 1)
        try database.psql("UPDATE tokenkeeper.topic_policy SET background_per_hour = 0", user: "a_operator")
        try ask(3)
        #expect(try claim(backgroundPerHour: 1).count == 3)
    }

    @Test func `an undelivered background push does not count against its device's limit`() throws {
        try register(1...1)
        for _ in 1...3 { try queue(payload: #"{"aps":{"content-available":1}}"#) }
        for _ in 1...5 {
            let claimed = try claim()
            #expect(claimed.count == 3)
            #expect(
                try finish(
                    claimed.enumerated().map {
                        RequestEnding(
                            number: $1.number, fate: $0 == 0 ? .returned(nil) : .later(.zero, "503"),
                            answer: $0 == 0 ? nil : .init(status: 503))
                    }) == 3)
        }
        #expect(try finish(try claim().map { RequestEnding(number: $0.number, fate: .answered) }) == 3)
        try queue(payload: #"{"aps":{"content-available":1}}"#)
        #expect(try claim() == [])
    }

    @Test func `alerts are not counted as background pushes`() throws {
        try register(1...1)
        for _ in 0..<5 { try queue() }
        #expect(try claim(backgroundPerHour: 1).count == 5)
        #expect(try count("background_send") == 0)
    }

    // What is left behind ----------------------------------------------------------------------------------------------

    @Test func `forget erases a token from the outbox and its results`() throws {
        try register(1...2)
        try queue()
        try queue(payload: #"{"aps":{"content-available":1}}"#)
        let claimed = try claim(1)
        _ = try finish(claimed.map { RequestEnding(number: $0.number, fate: .failed("x")) })
        try database.psql("SELECT tokenkeeper.unregister('\(Self.token(1))', 'com.example.app')")
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.app', upper('\(Self.token(1))'), '{\"aps\":{\"alert\":\"1\"}}')"
        )
        #expect(try claim(2).count == 1)
        try queue(payload: #"{"aps":{"alert":"more"}}"#)
        _ = try claim(backgroundPerHour: 3)
        try database.psql("SELECT tokenkeeper.forget('\(Self.token(1))')", user: "a_app")
        for table in ["suppressed_send", "failed_send", "send_request"] {
            #expect(try count(table, "lower(token) = '\(Self.token(1))'") == 0, "\(table)")
        }
        #expect(try count("send_request") > 0, "requests of the other token stay")
        #expect(try count("background_send", "token_key = tokenkeeper.token_key('\(Self.token(1))')") == 0)
    }

    @Test func `the sweep deletes what was suppressed or failed longer ago than the retention`() throws {
        try register(1...3)
        try queue()
        try database.psql("SELECT tokenkeeper.unregister('\(Self.token(1))', 'com.example.app')")
        let claimed = try claim()
        _ = try finish(claimed.map { RequestEnding(number: $0.number, fate: .failed("x")) })
        try database.psql("UPDATE tokenkeeper.suppressed_send SET suppressed_at = now() - interval '31 days'")
        try database.psql(
            "UPDATE tokenkeeper.failed_send SET failed_at = now() - interval '31 days' WHERE failed_id = 1")
        try database.psql(
            "INSERT INTO tokenkeeper.background_send VALUES ('production', 'com.example.app', '1', '{}', now() - interval '2 hours', 3)"
        )
        var daemon = try database.connect(user: "a_daemon")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400),
            allowance: 1000, maxShare: .percent(10), batch: 1)
        try SweepLease.request(.cli, on: &daemon)
        let lease = try #require(try SweepLease.claim(.requested, holder: "me", on: &daemon))
        let report = try Sweep(lease, plan, lockTimeout: .milliseconds(100)).perform(on: &daemon) { true }
        #expect(report.deletedSends == 2 && report.outcome == .finished)
        #expect(try count("failed_send") == 1)
        #expect(try count("background_send") == 0)
    }

    @Test func `status shows what waits, what failed, and when a certificate expires`() throws {
        try register(1...3)
        try queue()
        func warnings() throws -> String {
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status", user: "a_reader")
        }
        #expect(try warnings().contains("no running daemon sends"))
        var daemon = try database.connect(user: "a_daemon")
        func beat(expires: String) throws {
            let at = try database.psql("SELECT now() + interval '\(expires)'")
            try outbox.beat(
                credentials:
                    #"[{"name":"old","kind":"certificate","topics":["t"],"expires_at":"\#(at)"},{"name":"key","kind":"provider token","topics":["u"]}]"#,
                trouble: ["no credential is configured for t"], on: &daemon)
        }
        try beat(expires: "31 days")
        #expect(try !warnings().contains("expire") && !warnings().contains("no running daemon sends"))
        #expect(try warnings().contains("no credential is configured for t"))
        try beat(expires: "29 days")
        #expect(try warnings().contains("the certificate of credential old expires at"))
        try beat(expires: "-1 days")
        #expect(try warnings().contains("the certificate of credential old has expired at"))
        _ = try finish(try claim(1).map { RequestEnding(number: $0.number, fate: .failed("x")) })
        #expect(try warnings().contains("1 request failed; see tokenkeeper.failed_send"))
        #expect(
            try database.psql(
                "SELECT requests, failed_sends, credential_expires_at < now() FROM tokenkeeper.status", user: "a_reader"
            ) == "2|1|t")
    }

    @Test(arguments: [
        (#"{"a": 1, "b": [1, 2]}"#, #"{"a":1,"b":[1,2]}"#), (#"{"a": "x: y, z"}"#, #"{"a":"x: y, z"}"#),
        (#"{"a": "\" , \\", "b": 1}"#, #"{"a":"\" , \\","b":1}"#), ("{}", "{}"), (#"{"ü": "ä ö"}"#, #"{"ü":"ä ö"}"#),
    ])
    func `JSON is compacted, and strings stay unchanged`(text: String, compact: String) {
        #expect(String(decoding: compactJSON(text), as: UTF8.self) == compact)
    }
}
