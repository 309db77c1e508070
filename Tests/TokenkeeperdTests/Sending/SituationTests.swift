import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

/// What senders met at APNs in production, each with its right outcome. Nobody calls `resume_sending` in any of them.
@Suite(.ownThread) struct `Situations at APNs` {
    /// Retries wait for seconds; the tests do not.
    private func hurry(_ stage: SendingStage) throws {
        try stage.database.psql(
            "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND isfinite(scheduled_at)"
        )
    }

    /// Waits until every request has ended, without waiting for retries.
    private func settle(_ stage: SendingStage) throws {
        try eventually("the outbox is empty", within: SendingStage.longest) {
            try hurry(stage)
            return try stage.count("send_request") == 0
        }
        try stage.settled()
    }

    private func problems(_ stage: SendingStage) throws -> String {
        try stage.database.psql("SELECT array_to_string(problems, '; ') FROM tokenkeeper.sending_daemon")
    }

    @Test(arguments: [(500, "InternalServerError"), (400, "IdleTimeout"), (503, "ServiceUnavailable")])
    func `a connection that answers with errors only is replaced`(status: Int, reason: String) throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.connection == 1 ? .refused(status, reason) : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...30)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try settle(stage)
        #expect(try stage.results(200) == 30 && stage.count("failed_send") == 0)
        #expect(stage.apns.records.connections >= 2)
        #expect(daemon.stop() == 0)
    }

    @Test func `a few refusals of a provider token that APNs otherwise accepts stop nobody`() throws {
        let isOdd = Atomic(true)
        let stage = try SendingStage { _ in
        } answer: {
            $0.ordinal % 100 == 50 && isOdd.load(ordering: .acquiring) ? .refused(403, "InvalidProviderToken") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...300)
        let daemon = try stage.daemon()
        let campaign = try stage.campaign()
        try eventually("all but the refused are sent") { try stage.progress(campaign)["accepted"] ?? 0 >= 296 }
        #expect(try problems(stage) == "")
        isOdd.store(false, ordering: .releasing)
        try hurry(stage)
        try eventually("all are sent") {
            try hurry(stage)
            return try stage.progress(campaign) == ["addressed": 300, "accepted": 300]
        }
        try stage.ended(campaign)
        #expect(daemon.stop() == 0)
    }

    @Test func `one response that asks for fewer provider tokens does not stop the others`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.ordinal == 10 ? .refused(429, "TooManyProviderTokenUpdates") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...50)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try eventually("the others are sent") { try stage.results(200) == 49 }
        #expect(try problems(stage) == "")
        try settle(stage)
        #expect(try stage.results(200) == 50 && stage.count("failed_send") == 0)
        #expect(daemon.stop() == 0)
    }

    @Test func `a Live Activity's token that has expired is about its token, with 400 as with 410`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            switch $0.token?.suffix(1) {
            case "1": .refused(400, "ExpiredToken")
            case "2": .refused(410, "ExpiredToken")
            default: nil
            }
        }
        defer { stage.apns.stop() }
        try stage.register(1...400)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(try stage.count("failed_send") == 0 && problems(stage) == "")
        #expect(try stage.results(400) == 25 && stage.results(410) == 25 && stage.results(200) == 350)
        #expect(daemon.stop() == 0)
    }

    @Test(arguments: [(400, "TopicDisallowed"), (403, "Forbidden"), (403, "InvalidProviderToken")])
    func `a request that alone is refused fails alone, and the campaign ends`(status: Int, reason: String) throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.token == SendingStage.token(7) ? .refused(status, reason) : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...200)
        let daemon = try stage.daemon()
        let campaign = try stage.campaign()
        try eventually("the others are sent, and it has its reason and count") {
            try stage.count("send_request", "attempts > 0 AND last_error = 'APNs answered \(status) \(reason)'") == 1
                && stage.progress(campaign)["accepted"] == 199
        }
        #expect(try problems(stage) == "")
        try eventually("the campaign has ended") {
            try hurry(stage)
            return try stage.state(campaign) == "ended"
        }
        #expect(try stage.progress(campaign) == ["addressed": 200, "accepted": 199, "failed": 1])
        #expect(
            try stage.database.psql("SELECT error FROM tokenkeeper.failed_send")
                == "APNs answered \(status) \(reason), 5 times, while other requests of the topic were accepted")
        #expect(daemon.stop() == 0)
    }

    @Test func `a request that is never answered holds nobody up`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.token == SendingStage.token(1) ? .never : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...1)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try eventually("it is under way") { stage.apns.records.requests == 1 }
        try stage.register(2...51)
        try stage.enqueue()
        try eventually("the others are sent, long before it times out", within: 15) { try stage.results(200) == 50 }
        #expect(daemon.stop() == 0)
    }

    @Test func `too many requests for one device rest that device, and no other`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.token == SendingStage.token(7) ? .refused(429, "TooManyRequests") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...20)
        for number in 1...30 {
            try stage.enqueue("device_id => 'd7'", payload: #"{"aps":{"alert":"\#(number)"}}"#)
        }
        let daemon = try stage.daemon()
        try eventually("one was tried") { try stage.count("send_request", "attempts = 1") == 1 }
        try stage.enqueue()
        try eventually("the others are sent") { try stage.results(200) == 19 }
        try eventually("all of the device wait") {
            try stage.count("send_request", "claimed_by IS NULL AND scheduled_at > now()") == 31
        }
        #expect(stage.apns.records.requests == 20)
        #expect(daemon.stop() == 0)
    }

    @Test func `a push that lives for five minutes survives one error`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.ordinal == 1 ? .refused(500, "InternalServerError") : nil
        }
        defer { stage.apns.stop() }
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, expiration)
            VALUES ('com.example.app', 'aa', '{"aps":{"alert":"Your code is 123"}}', now() + interval '5 minutes')
            """)
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(try stage.results(200) == 1 && stage.count("failed_send") == 0)
        #expect(daemon.stop() == 0)
    }

    @Test(arguments: [400, 403, 404, 413, 429, 502, 504, 200])
    func `a gateway's own pages lose no request, and no topic stops`(status: Int) throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.ordinal > 6
                ? nil
                : .raw(
                    .init(
                        status: "\(status)", headers: [("content-type", "text/html")],
                        body: Array("<html>Welcome!</html>".utf8)))
        }
        defer { stage.apns.stop() }
        try stage.register(1...20)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try settle(stage)
        #expect(try stage.results(200) == 20 && stage.count("failed_send") == 0)
        #expect(try stage.count("token", "state = 'active'") == 20)
        #expect(daemon.stop() == 0)
    }

    @Test func `a credential that is refused for a while stops, and goes on by itself`() throws {
        let isRefused = Atomic(true)
        let stage = try SendingStage { _ in
        } answer: { _ in
            isRefused.load(ordering: .acquiring) ? .refused(403, "InvalidProviderToken") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...3000)
        try stage.enqueue()
        let daemon = try stage.daemon(["send.max_in_flight=50"])
        let problem =
            "APNs refuses the credential (main, production), and requests wait: APNs answered 403 InvalidProviderToken"
        try eventually("it is shown") {
            try stage.database.psql("SELECT warnings::text FROM tokenkeeper.status").contains(problem)
        }
        try eventually("nothing is claimed") { try stage.count("send_request", "claimed_by IS NOT NULL") <= 1 }
        #expect(stage.apns.records.requests <= 200, "only a part of the queue was tried")
        #expect(daemon.logged.contains(problem))
        isRefused.store(false, ordering: .releasing)
        try settle(stage)
        #expect(try stage.results(200) == 3000 && stage.count("failed_send") == 0)
        try eventually("it is shown no more") { try problems(stage) == "" }
        #expect(daemon.stop() == 0)
    }

    private static let bad: [(String, @Sendable (SendingStage, TemporaryDirectory) throws -> [String])] = [
        ("a missing file", { stage, _ in ["credential.bad.key_file=/nonexistent.p8"] }),
        (
            "a file that is no key",
            { _, folder in ["credential.bad.key_file=\(try folder.write("nonsense", to: "bad.p8"))"] }
        ),
        (
            "a certificate that has expired",
            { stage, _ in
                let identity = try stage.files.clientCertificate(
                    "expired-\(stage.database.name)", topic: "com.bad.app", days: -1)
                return [
                    "credential.bad.certificate_file=\(identity.certificate)",
                    "credential.bad.certificate_key_file=\(identity.key)",
                ]
            }
        ),
    ]

    @Test(arguments: bad.indices)
    func `one bad credential stops its own topics, is named, and all else works`(number: Int) throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let folder = try TemporaryDirectory()
        let (name, settings) = Self.bad[number]
        var more = try settings(stage, folder) + ["credential.bad.topics=com.bad.app"]
        if more[0].contains("key_file") && !more[0].contains("certificate") {
            more += ["credential.bad.key_id=ABCDEFGHIJ", "credential.bad.team_id=ABCDEFGHIJ"]
        }
        try stage.register(1...5)
        try stage.enqueue()
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.bad.app', 'aa', '{"aps":{"alert":"x"}}');
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('com.example.own', 'aa', 200)
            """)
        let daemon = try stage.daemon(more, timing: 0.05)
        try eventually("\(name): the others are sent, and results are drained") { try stage.results(200) == 6 }
        if number < 2 {
            try eventually("it is named") { try problems(stage).contains("credential.bad") }
            #expect(daemon.logged.contains("credential.bad"))
        }
        #expect(try stage.count("send_request", "topic = 'com.bad.app'") == 1)
        #expect(daemon.stop() == 0)
    }

    /// fleetdm#44376, uniqush-push#123, rpush#62.
    @Test(arguments: [true, false])
    func `a key file that is replaced is taken up, at SIGHUP or by itself`(signals: Bool) throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let folder = try TemporaryDirectory()
        let stranger = try TestAuthority()
        let file = try folder.write(try String(contentsOfFile: stranger.signingKeyFile, encoding: .utf8), to: "key.p8")
        try stage.register(1...20)
        try stage.enqueue()
        let daemon = try stage.daemon(["credential.main.key_file=\(file)"], timing: signals ? 1 : 0.05)
        try eventually("it is refused") { try problems(stage).contains("403 InvalidProviderToken") }
        _ = try folder.write(try String(contentsOfFile: stage.files.signingKeyFile, encoding: .utf8), to: "key.p8")
        if signals { daemon.signal(SIGHUP) }
        try settle(stage)
        #expect(try stage.results(200) == 20 && stage.count("failed_send") == 0)
        #expect(daemon.logged.contains("the files of a credential have changed, and are used"))
        #expect(daemon.stop() == 0)
    }

    /// OneSignal-Cordova-SDK#483, maple#524: tokens of development builds, registered as production.
    @Test func `tokens of the other environment are recognized by a few tries that show nothing`() throws {
        let sandbox = try SendingStage { $0.sandbox = true }
        defer { sandbox.apns.stop() }
        let stage = try SendingStage { _ in
        } answer: {
            $0.token.map { $0 > SendingStage.token(20) } == true ? nil : .refused(400, "BadDeviceToken")
        }
        defer { stage.apns.stop() }
        try stage.register(1...60)
        try stage.enqueue()
        let daemon = try stage.daemon(["send.sandbox_server=localhost:\(sandbox.apns.port)"])
        try stage.settled()
        let found = "knows 3 of 3 that were tried in the sandbox: these are sandbox tokens"
        try eventually("it is shown") { try problems(stage).contains(found) }
        try eventually("it is logged") { daemon.logged.contains("tried in the sandbox: these are sandbox tokens") }
        let tries = sandbox.apns.records.exchanges.map(\.request)
        #expect(tries.count == 3 && Set(tries.map(\.token)).count == 3)
        #expect(tries.allSatisfy { $0.pushType == "background" && $0.priority == "5" && $0.expiration == "0" })
        #expect(try stage.results(200) == 40 && stage.results(400) == 20)
        #expect(try stage.count("token", "environment = 'sandbox'") == 0, "the tries are nobody's results")
        #expect(daemon.stop() == 0)
    }

    /// node-apn#590, bark-server#76: the clock of a machine is wrong, and APNs refuses each provider token.
    @Test(arguments: [-2, 2])
    func `a wrong clock is named, by the date of APNs' responses`(hours: Int64) throws {
        let ahead = Atomic<Int64>(hours * 3_600_000)
        let now: @Sendable () -> Int64 = { FakeOptions.systemClock() - ahead.load(ordering: .relaxed) }
        let stage = try SendingStage {
            $0.datesAnswers = true
            $0.now = now
        }
        defer { stage.apns.stop() }
        try stage.register(1...20)
        try stage.enqueue()
        let daemon = try stage.daemon(timing: 0.05)
        let found = "the clock of this machine is 2h \(hours > 0 ? "ahead of" : "behind") APNs'"
        try eventually("it is shown") {
            try hurry(stage)
            return try problems(stage).contains(found)
        }
        ahead.store(0, ordering: .relaxed)
        try settle(stage)
        #expect(try stage.results(200) == 20 && stage.count("failed_send") == 0)
        try eventually("it is shown no more") { try !problems(stage).contains("the clock") }
        #expect(daemon.logged.contains(found))
        #expect(daemon.stop() == 0)
    }

    /// A platform sends for hundreds of apps, each with the key of its own team.
    @Test func `a hundred credentials need no thread each, and are one line if APNs is away`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let credentials = (1...100).flatMap { number in
            stage.key.map { $0.replacingOccurrences(of: ".main.", with: ".c\(number).") }.dropLast()
                + ["credential.c\(number).topics=com.example.a\(number)"]
        }
        func send() throws {
            try stage.database.psql(
                """
                INSERT INTO tokenkeeper.send_request (topic, token, payload)
                SELECT 'com.example.a' || i, lpad(to_hex(i), 8, '0'), '{"aps":{"alert":"x"}}' FROM generate_series(1, 100) AS i
                """)
        }
        try send()
        let daemon = try stage.daemon(credential: credentials, timing: 0.05)
        try settle(stage)
        #expect(try stage.results(200) == 100)
        let threads = try FileManager.default.contentsOfDirectory(atPath: "/proc/\(daemon.pid)/task").count
        #expect(threads < 16, "\(threads) threads")
        #expect(daemon.stop() == 0)
        stage.apns.stop()
        try send()
        let next = try stage.daemon(credential: credentials, timing: 0.05)
        try eventually("it is shown") { try problems(stage).contains("; 97 more)") }
        #expect(next.stop() == 0)
        #expect(next.logged.matches(of: /msg="requests cannot be sent/).count < 5)
    }
}
