import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// The rules of the outbox in detail: what it counts, keeps and leaves alone.
@Suite(.ownThread) struct `The outbox, rule by rule` {
    let database: TestDatabase
    let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
    let app = TopicScope(environment: "production", topic: "com.example.app")
    let sandbox = TopicScope(environment: "sandbox", topic: "com.example.app")
    let other = TopicScope(environment: "production", topic: "com.example.other")

    static let alert = #"{"aps":{"alert":"Hello"}}"#
    static let silent = #"{"aps":{"content-available":1}}"#

    init() throws {
        try self.init(on: .shared)
    }

    private init(on cluster: TestCluster) throws {
        database = try cluster.database()
    }

    /// - Returns: The request's number.
    @discardableResult
    private func ask(
        _ payload: String = alert, of scope: TopicScope? = nil, token: String = "aa",
        _ more: (column: String, value: String)? = nil
    ) throws -> Int64 {
        let scope = scope ?? app
        let (columns, values) = (more.map { ", \($0.column)" } ?? "", more.map { ", \($0.value)" } ?? "")
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (environment, topic, token, payload\(columns)) "
                + "VALUES ('\(scope.environment)', '\(scope.topic)', '\(token)', '\(payload)'\(values))")
        return Int64(try database.psql("SELECT max(request_id) FROM tokenkeeper.send_request")) ?? -1
    }

    private func claim(_ scope: TopicScope? = nil, backgroundPerHour: Int = 1) throws -> Outbox.Claim {
        var daemon = try database.connect(user: "a_daemon")
        return try outbox.claim(scope ?? app, most: 100, backgroundPerHour: backgroundPerHour, on: &daemon)
    }

    private func finish(_ numbers: [Int64], _ fate: RequestFate) throws {
        var daemon = try database.connect(user: "a_daemon")
        _ = try outbox.finish(numbers.map { RequestEnding(number: $0, fate: fate) }, on: &daemon)
    }

    private func waiting(_ condition: String = "true") throws -> String {
        try database.psql(
            "SELECT coalesce(string_agg(request_id::text, ' ' ORDER BY request_id), '') FROM tokenkeeper.send_request WHERE claimed_by IS NULL AND \(condition)"
        )
    }

    private func count(_ table: String, _ condition: String = "true") throws -> Int {
        Int(try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")) ?? -1
    }

    // Background pushes ------------------------------------------------------------------------------------------------

    @Test func `each environment and topic has its own limit, which does not affect other requests`() throws {
        var sent: [Int64] = []
        for scope in [app, sandbox, other] {
            try ask(Self.silent, of: scope)
            try ask(Self.silent, of: scope)
            let claimed = try claim(scope).requests.map(\.number)
            #expect(claimed.count == 1, "\(scope)")
            sent += claimed
        }
        #expect(try count("send_request", "postponed AND claimed_by IS NULL") == 3 && count("suppressed_send") == 0)
        // A push that was not sent does not count in its environment.
        try finish([sent[1]], .returned(nil))
        #expect(
            try database.psql(
                "SELECT string_agg(cardinality(sent_at)::text, ' ' ORDER BY topic, environment) FROM tokenkeeper.background_send"
            )
                == "1 0 1")
    }

    @Test func `alerts to the same device do not count, are not suppressed and overtake nothing`() throws {
        let later = try ask(Self.alert, ("scheduled_at", "now() + interval '1 hour'"))
        for _ in 1...2 { try ask() }
        try ask(Self.silent)
        try ask()
        #expect(try claim().requests.count == 4, "three alerts, and the limit")
        let newest = try ask(Self.silent)
        try ask()
        let second = try claim()
        #expect(second.requests.count == 1 && second.suppressed == 0, "the alert")
        #expect(try waiting() == "\(later) \(newest)" && count("suppressed_send") == 0)
    }

    @Test
    func `the delayed push waits until an hour after the first, and is reported when overtaken`()
        throws
    {
        try ask(Self.silent)
        #expect(try claim().requests.count == 1)
        try database.psql("UPDATE tokenkeeper.background_send SET sent_at = ARRAY[now() - interval '40 minutes']")
        try ask(Self.silent)
        #expect(try claim().requests.isEmpty)
        #expect(
            try waiting("scheduled_at BETWEEN now() + interval '19 minutes' AND now() + interval '20 minutes'") != "")
        let newest = try ask(Self.silent)
        #expect(try claim().suppressed == 1)
        #expect(try waiting("postponed") == "\(newest)")
        try database.psql(
            "DELETE FROM tokenkeeper.background_send; UPDATE tokenkeeper.send_request SET scheduled_at = NULL")
        #expect(try claim().requests.map(\.number).contains(newest))
        #expect(try count("send_request", "postponed") == 0, "it no longer waits")
    }

    @Test func `an overtaken push is reported once, and an older one overtakes nothing`() throws {
        let older = try ask(Self.silent, ("scheduled_at", "now() + interval '1 hour'"))
        try ask(Self.silent)
        let first = try ask(Self.silent)
        #expect(try claim().requests.count == 1)
        #expect(try waiting("postponed") == "\(first)")
        let second = try ask(Self.silent)
        try database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE request_id = \(first)")
        #expect(try claim().suppressed == 1)
        #expect(try count("suppressed_send", "request_id = \(first)") == 1)
        try database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE request_id = \(older)")
        _ = try claim()
        #expect(try waiting("request_id = \(second)") == "\(second)")
    }

    @Test
    func `undelivered pushes do not count against the limit, but interrupted ones do`()
        throws
    {
        for _ in 1...3 { try ask(Self.silent) }
        let claimed = try claim(backgroundPerHour: 3).requests.map(\.number)
        try finish([claimed[0]], .returned(nil))
        #expect(try database.psql("SELECT cardinality(sent_at) FROM tokenkeeper.background_send") == "2")
        try finish([claimed[1]], .interrupted(.zero, "gone"))
        #expect(try database.psql("SELECT cardinality(sent_at) FROM tokenkeeper.background_send") == "2")
    }

    // Claims and endings -----------------------------------------------------------------------------------------------

    @Test func `a request that expired while it waited fails`() throws {
        try ask(Self.alert, ("expiration", "now() - interval '1 second'"))
        try ask(Self.alert, ("expiration", "now() + interval '1 minute'"))
        try ask(Self.alert, ("expiration", "'epoch'"))
        let claim = try claim()
        #expect(claim.requests.count == 2 && claim.failed == 1)
        #expect(
            try database.psql("SELECT error FROM tokenkeeper.failed_send")
                == "its expiration passed before it could be sent")
    }

    @Test func `the claim asks the gate of the request's environment and topic`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 'com.example.app'), tokenkeeper.register('aa', 'com.example.app', 'sandbox'),
                   tokenkeeper.register('aa', 'com.example.other'), tokenkeeper.unregister('aa', 'com.example.app')
            """)
        for scope in [app, sandbox, other] {
            try ask(of: scope)
            #expect(try claim(scope).suppressed == (scope == app ? 1 : 0), "\(scope)")
        }
    }

    @Test func `a request without an apns-id gets one when it is claimed, and keeps it`() throws {
        try ask(Self.alert, ("apns_id", "NULL"))
        let claimed = try #require(try claim().requests.first)
        #expect(claimed.request.id.utf8.count == 36)
        try finish([claimed.number], .returned(nil))
        #expect(try claim().requests.first?.request.id == claimed.request.id)
    }

    @Test
    func `first_sent_at restarts for untried requests and stays for tried ones, and errors are kept`()
        throws
    {
        let (untried, tried, cut) = (try ask(), try ask(token: "bb"), try ask(token: "cc"))
        let first = try claim().requests
        try finish([untried], .returned(nil))
        #expect(try waiting("first_sent_at IS NULL") == "\(untried)")
        try finish([tried], .later(.zero, "503"))
        try finish([cut], .interrupted(.zero, "gone"))
        let second = try claim().requests
        #expect(second.count == 3)
        try finish([untried, tried, cut], .returned(.seconds(-1)))
        try database.psql("UPDATE tokenkeeper.send_request SET attempts = 0 WHERE request_id = \(cut)")
        #expect(try waiting("last_error IS NOT NULL AND first_sent_at IS NOT NULL") == "\(tried) \(cut)")
        let third = try claim().requests
        for number in [tried, cut] {
            #expect(
                third.first { $0.number == number }?.firstSentAt == first.first { $0.number == number }?.firstSentAt)
        }
        try finish([cut], .returned(nil))
        #expect(try waiting("first_sent_at IS NOT NULL") == "\(cut)")
    }

    @Test func `a request returned without a pause keeps its schedule, and another daemon's claim stays`()
        throws
    {
        let number = try ask(Self.alert, ("scheduled_at", "'2020-01-01Z'"))
        #expect(try claim().requests.count == 1)
        var daemon = try database.connect(user: "a_daemon")
        let stranger = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(500))
        #expect(try stranger.finish([RequestEnding(number: number, fate: .returned(nil))], on: &daemon).requests == 0)
        #expect(try waiting() == "")
        try finish([number], .returned(nil))
        #expect(try waiting("scheduled_at = '2020-01-01Z'") == "\(number)")
    }

    @Test func `results carry the environment of their requests`() throws {
        let number = try ask(of: sandbox)
        #expect(try claim(sandbox).requests.count == 1)
        var daemon = try database.connect(user: "a_daemon")
        _ = try outbox.finish(
            [
                RequestEnding(
                    number: number, fate: .later(.zero, "é\u{0}"), answer: .init(status: 503, apnsID: "é\u{0}"))
            ],
            on: &daemon)
        #expect(try database.psql("SELECT environment, apns_id FROM tokenkeeper.send_result") == "sandbox|???")
        #expect(try waiting("last_error = '???'") == "\(number)")
    }

    @Test func `locked requests are left for later and do not delay others`() throws {
        let (locked, free) = (try ask(), try ask(token: "bb"))
        var other = try database.connect()
        try other.execute("BEGIN; SELECT FROM tokenkeeper.send_request WHERE request_id = \(locked) FOR UPDATE")
        #expect(try claim().requests.map(\.number) == [free])
        try other.execute("COMMIT")
        #expect(try claim().requests.map(\.number) == [locked])
        try other.execute("BEGIN; SELECT FROM tokenkeeper.send_request WHERE request_id = \(locked) FOR UPDATE")
        let heir = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(500))
        var daemon = try database.connect(user: "a_daemon")
        #expect(try heir.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1)
        try other.execute("COMMIT")
        #expect(try heir.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1)
    }

    @Test func `a request without a response adds no result`() throws {
        for token in ["aa", "bb", "cc", "dd"] { try ask(token: token) }
        let claimed = try claim().requests.map(\.number)
        try finish([claimed[0]], .failed("x"))
        try finish([claimed[1]], .later(.zero, "x"))
        try finish([claimed[2]], .interrupted(.zero, "x"))
        try finish([claimed[3]], .returned(nil))
        #expect(try count("send_result") == 0 && count("send_request") == 3)
    }

    @Test func `a suppressed request shows the cause with its reason and instant`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 'com.example.app', registered_at => now() - interval '30 days') FROM unnest(ARRAY['aa', 'bb']) AS t;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            VALUES ('com.example.app', 'aa', 400, '{"reason":"BadDeviceToken"}', now() - interval '1 minute')
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try database.psql("SELECT tokenkeeper.unregister('bb', 'com.example.app')")
        for token in ["aa", "bb"] { try ask(token: token) }
        #expect(try claim().suppressed == 2)
        #expect(
            try database.psql(
                "SELECT string_agg(concat_ws(' ', state, reason, invalidated_at > now() - interval '1 hour'), ', ' ORDER BY token) FROM tokenkeeper.suppressed_send"
            )
                == "suspect BadDeviceToken t, unregistered_by_app unregistered by the app t")
    }

    @Test func `claims, endings and heartbeats are on disk before anything follows from them`() throws {
        try database.psql(
            """
            CREATE TABLE public.durability (of text, setting text);
            GRANT INSERT ON public.durability TO PUBLIC;
            CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN INSERT INTO public.durability VALUES (tg_op, current_setting('synchronous_commit')); RETURN NULL; END $$;
            CREATE TRIGGER note AFTER UPDATE OR DELETE ON tokenkeeper.send_request FOR EACH ROW EXECUTE FUNCTION public.note();
            CREATE TRIGGER note AFTER INSERT ON tokenkeeper.sending_daemon FOR EACH ROW EXECUTE FUNCTION public.note()
            """, user: "postgres")
        var daemon = try database.connect(user: "a_daemon")
        try outbox.beat(credentials: "[]", trouble: [], on: &daemon)
        try ask()
        try finish(try claim().requests.map(\.number), .answered)
        #expect(
            try database.psql(
                "SELECT string_agg(of || ' ' || setting, ', ' ORDER BY of) FROM durability", user: "postgres")
                == "DELETE on, INSERT on, UPDATE on")
    }

    @Test(arguments: [
        (alert, "priority", "1", true), (#"{"aps":{"content-available":1,"sound":"x"}}"#, "push_type", "'alert'", true),
        (#"{"aps":{"content-available":1,"badge":0}}"#, "push_type", "'background'", false),
        (#"{"aps":{"content-available":1,"sound":"x"}}"#, "push_type", "'background'", false),
        // 4091 bytes, and 4098 as PostgreSQL writes it.
        (#"{"a":1,"b":2,"c":3,"d":"\#(String(repeating: "x", count: 4067))"}"#, "priority", "10", true),
        (#"{"a":"\#(String(repeating: "x", count: 5000))"}"#, "push_type", "'voip'", true),
        (#"{"a":"\#(String(repeating: "x", count: 5113))"}"#, "push_type", "'voip'", false),
    ])
    func `a request that APNs accepts is not refused`(payload: String, column: String, value: String, isSent: Bool)
        throws
    {
        let scope = value == "'voip'" ? TopicScope(environment: "sandbox", topic: "com.example.app.voip") : sandbox
        try ask(payload, of: scope, (column, value))
        #expect(try claim(scope).requests.count == (isSent ? 1 : 0))
        #expect(try count("failed_send") == (isSent ? 0 : 1))
    }

    @Test func `a payload that text cannot hold fails and delays no other`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.app', 'aa', ('{"a":[' || string_agg('1e131071', ',') || ']}')::json FROM generate_series(1, 9000)
            """, user: "a_sender")
        let good = try ask()
        let claim = try claim()
        #expect(claim.requests.map(\.number) == [good] && claim.failed == 1)
        #expect(
            try database.psql("SELECT error FROM tokenkeeper.failed_send")
                == "payload is 81007 bytes long as written, expected at most 65536")
        try ask(#"{"a":[1e131071,1e131071]}"#)
        #expect(try self.claim().failed == 1)
        #expect(
            try database.psql("SELECT error FROM tokenkeeper.failed_send ORDER BY failed_id DESC LIMIT 1")
                == "payload is over 4096 bytes long")
    }

    @Test func `postponed requests are found by device, however many there are`() throws {
        var daemon = try database.connect()
        let read = "SELECT pg_stat_get_xact_tuples_returned('tokenkeeper.send_request_postponed'::regclass)"
        func ask(devices: Int) throws {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_request (topic, token, payload)
                SELECT 'com.example.app', lpad(to_hex(i), 8, '0'), '\(Self.silent)' FROM generate_series(1, \(devices)) AS i
                """)
        }
        // The table's statistics are from a time when nothing was postponed.
        try daemon.execute("ALTER TABLE tokenkeeper.send_request SET (autovacuum_enabled = off)")
        try daemon.execute(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.t' || i % 1000, lpad(to_hex(i), 8, '0'), '\(Self.alert)' FROM generate_series(1, 30000) AS i
            """)
        try daemon.execute("ANALYZE tokenkeeper.send_request")
        try daemon.execute("DELETE FROM tokenkeeper.send_request")
        for _ in 1...2 { try ask(devices: 1500) }
        #expect(try outbox.claim(app, most: 3000, backgroundPerHour: 1, on: &daemon).requests.count == 1500)
        #expect(try count("send_request", "postponed") == 1500)
        try ask(devices: 10)
        try daemon.execute("BEGIN")
        let before = Int(try daemon.scalar(read) ?? "") ?? -1
        try daemon.execute(
            "SELECT count(*) FROM tokenkeeper.claim_requests('production', 'com.example.app', 'host/1/1', 1000, 1, '-infinity')"
        )
        let after = Int(try daemon.scalar(read) ?? "") ?? .max
        try daemon.execute("COMMIT")
        #expect(try count("send_request", "postponed") == 1500 && count("suppressed_send") == 10)
        #expect(after - before <= 100, "\(after - before) index entries for 10 devices")
    }

    @Test func `nothing is claimed from a paused topic, even by a daemon that missed the pause`() throws {
        try ask()
        try database.psql("SELECT tokenkeeper.pause_sending('com.example.app')", user: "a_operator")
        #expect(try claim().dueAt == nil && waiting() != "")
    }

    // What operators call ----------------------------------------------------------------------------------------------

    @Test func `a pause applies to one environment, and a typing error is refused`() throws {
        for scope in [app, sandbox] { try ask(of: scope) }
        for wrong in ["''", "NULL", "'com.example.app', 'prod'", "'', 'sandbox'"] {
            #expect(throws: TestFailure.self, "\(wrong)") {
                try database.psql("SELECT tokenkeeper.pause_sending(\(wrong))", user: "a_operator")
            }
        }
        #expect(
            try database.psql(
                "SELECT tokenkeeper.pause_sending('com.example.app', 'sandbox', 'why')", user: "a_operator")
                == "t")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try outbox.scopes(on: &daemon).due == [app])
        try database.psql("SELECT tokenkeeper.pause_sending('com.example.app', reason => 'here')", user: "a_operator")
        #expect(try outbox.resumed(after: nil, on: &daemon).topics.isEmpty)
        let last = try outbox.resumed(after: nil, on: &daemon).last
        #expect(
            try database.psql("SELECT string_agg(reason, ' ' ORDER BY environment) FROM tokenkeeper.paused_topic")
                == "here why")
        #expect(
            try database.psql("SELECT tokenkeeper.resume_sending('com.example.app', NULL)", user: "a_operator") == "t")
        #expect(try outbox.scopes(on: &daemon).due == [app])
        #expect(try outbox.resumed(after: last, on: &daemon).topics == [app], "daemons that pause it see it")
        #expect(
            try database.psql(
                "SELECT string_agg(operation || ' ' || environment, ', ' ORDER BY operation_id) FROM tokenkeeper.operation"
            )
                == "sending_paused sandbox, sending_paused production, sending_resumed production")
    }

    @Test func `resuming makes requests due that wait for another try, and no others`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, scheduled_at)
            VALUES ('com.example.app', 'aa', '\(Self.alert)', NULL), ('com.example.other', 'aa', '\(Self.alert)', NULL),
                   ('com.example.app', 'cc', '\(Self.alert)', now() + interval '1 hour')
            """)
        let other = TopicScope(environment: "production", topic: "com.example.other")
        for scope in [app, other] {
            let claimed = try claim(scope).requests.map(\.number)
            #expect(claimed.count == 1)
            try finish(claimed, .later(.seconds(300), "APNs answered 403 InvalidProviderToken"))
        }
        // As the request of a paused campaign.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, scheduled_at, deferred, last_error)
            VALUES ('com.example.app', 'dd', '\(Self.alert)', 'infinity', true, 'APNs answered 403 InvalidProviderToken')
            """, user: "postgres")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try outbox.scopes(on: &daemon).due == [])
        try database.psql("SELECT tokenkeeper.resume_sending('com.example.app')", user: "a_operator")
        #expect(try outbox.scopes(on: &daemon).due == [app])
        #expect(try claim(app).requests.map(\.request.address.token) == [DeviceToken(hex: "aa")!])
    }

    @Test func `failed requests are requeued by number, unchanged, and the operation is recorded`() throws {
        for token in ["aa", "bb"] {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, priority, expiration, collapse_id)
                VALUES ('sandbox', 'com.example.app', '\(token)', '\(Self.alert)', 5, '2040-01-01Z', 'c')
                """)
        }
        let claimed = try claim(sandbox).requests.map(\.number)
        try finish(claimed, .failed("x"))
        let columns =
            "queued_at, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id"
        let before = try database.psql("SELECT \(columns) FROM tokenkeeper.failed_send WHERE token = 'bb'")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.requeue_failed(ARRAY(SELECT failed_id FROM tokenkeeper.failed_send WHERE token = 'bb'))",
                user: "a_operator") == "1")
        #expect(try count("failed_send", "token = 'aa'") == 1)
        #expect(
            try database.psql(
                "SELECT \(columns) FROM tokenkeeper.send_request") == before)
        #expect(try database.psql("SELECT operation, rows FROM tokenkeeper.operation") == "failed_requeued|1")
    }

    // Daemons ----------------------------------------------------------------------------------------------------------

    @Test
    func
        `a daemon that beats again has come back, with its new trouble; and one that had nothing is forgotten after a day`()
        throws
    {
        var daemon = try database.connect(user: "a_daemon")
        try outbox.beat(credentials: "[]", trouble: ["old"], on: &daemon)
        try outbox.signOff(on: &daemon)
        try outbox.beat(credentials: "[]", trouble: ["new"], on: &daemon)
        #expect(
            try database.psql("SELECT stopped_at IS NULL, problems FROM tokenkeeper.sending_daemon") == "t|{new}")
        let gone = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(500))
        try gone.beat(credentials: "[]", trouble: [], on: &daemon)
        try ask()
        #expect(try gone.claim(app, most: 1, backgroundPerHour: 0, on: &daemon).requests.count == 1)
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = heartbeat_at - interval '2 days' WHERE daemon_id = 'host/2/1'"
        )
        try outbox.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try count("sending_daemon") == 2, "it has claimed something")
        #expect(
            try outbox.takeOver(on: &daemon, isSilent: { _, _ in false }, isAlive: { _ in true }).requests == 0,
            "its heartbeat has not been seen for long enough")
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in true }).requests == 1)
        try outbox.beat(credentials: "[]", trouble: [], on: &daemon)
        #expect(try count("sending_daemon") == 1)
    }

    @Test func `a daemon does not take over its own requests`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try ask()
        #expect(try claim().requests.count == 1)
        #expect(try outbox.takeOver(on: &daemon, isAlive: { _ in false }).requests == 0)
    }

    // What is left behind ----------------------------------------------------------------------------------------------

    @Test func `status counts only daemons with a heartbeat, and is silent when nothing waits`() throws {
        func warnings() throws -> String {
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status", user: "a_reader")
        }
        #expect(try !warnings().contains("no running daemon sends"), "nothing waits")
        try ask()
        var daemon = try database.connect(user: "a_daemon")
        try outbox.beat(credentials: "[]", trouble: ["trouble"], on: &daemon)
        #expect(try !warnings().contains("no running daemon sends"))
        try outbox.signOff(on: &daemon)
        #expect(try warnings().contains("no running daemon sends") && !warnings().contains("trouble"))
        try outbox.beat(credentials: "[]", trouble: ["trouble"], on: &daemon)
        let second = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(500))
        try second.beat(credentials: "[]", trouble: ["trouble"], on: &daemon)
        #expect(
            try warnings().split(separator: "\n").count { $0 == "trouble" } == 1, "reported once, however many have it")
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = clock_timestamp() - interval '61 seconds'")
        #expect(try warnings().contains("no running daemon sends") && !warnings().contains("trouble"))
    }

    @Test func `forget erases malformed tokens that contain the token`() throws {
        let stage = try Self(on: .ofErasures)
        let token = String(repeating: "ab", count: 32)
        try stage.database.psql("SELECT tokenkeeper.register('\(token)', 'com.example.app')")
        for text in ["?\(token)", "{\(token.uppercased())}", "cd"] { try stage.ask(token: text) }
        #expect(try stage.claim().failed == 2)
        try stage.ask(Self.silent, token: token)
        #expect(try stage.claim().requests.count == 1 && stage.count("background_send") == 1)
        try stage.ask(token: "x\(token)")
        try stage.database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app")
        try stage.database.finishErasures()
        #expect(
            try stage.count("send_request", "token LIKE '%ab%'") == 0 && stage.count("send_request") == 1)
        #expect(try stage.count("failed_send") == 0 && stage.count("background_send") == 0)
    }
}
