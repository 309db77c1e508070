import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TestThreads
import Testing

/// Three daemons send while APNs, one of its servers or topics, something in between, or a host fails: one after the other and at the same time.
/// `TEST_SOAK=whole` lasts an hour, with the pauses of production.
@Suite(.ownThread) struct `Sending beside faults` {
    /// Topics of two credentials. Only those of the first one meet faults, except for what a lost daemon or connection does to everybody.
    private static let disturbed = (1...4).map { "com.example.a\($0)" }
    private static let calm = ["com.calm.a", "com.calm.b"]
    private static let tokens = 300

    private typealias Kind = (name: String, answer: @Sendable (inout SeededChance) -> FakeAnswer?)

    private static let ofTopics: [Kind] = [
        ("TopicDisallowed", { _ in .refused(400, "TopicDisallowed") }),
        ("Forbidden", { _ in .refused(403, "Forbidden") }),
        ("MissingTopic", { _ in .refused(400, "MissingTopic") }), ("BadTopic", { _ in .refused(400, "BadTopic") }),
    ]

    private static let ofCredentials: [Kind] = [
        ("InvalidProviderToken", { _ in .refused(403, "InvalidProviderToken") }),
        ("ExpiredProviderToken", { _ in .refused(403, "ExpiredProviderToken") }),
        ("TooManyProviderTokenUpdates", { _ in .refused(429, "TooManyProviderTokenUpdates") }),
        ("InternalServerError", { _ in .refused(500, "InternalServerError") }),
        (
            "some errors",
            { (chance: inout SeededChance) in chance.next() % 3 == 0 ? .refused(500, "InternalServerError") : nil }
        ),
        ("Shutdown", { (chance: inout SeededChance) in chance.next() % 20 == 0 ? .refused(503, "Shutdown") : nil }),
        (
            "IdleTimeout",
            { (chance: inout SeededChance) in chance.next() % 4 == 0 ? .refused(400, "IdleTimeout") : nil }
        ),
        (
            "TooManyRequests",
            { (chance: inout SeededChance) in chance.next() % 10 == 0 ? .refused(429, "TooManyRequests") : nil }
        ),
        ("a gateway's page", { _ in .raw(.init(status: "502", body: Array("<html>Bad Gateway</html>".utf8))) }),
        ("a portal's page", { _ in .raw(.init(status: "200", body: Array("<html>Welcome</html>".utf8))) }),
        ("refused streams", { (chance: inout SeededChance) in chance.next() % 3 == 0 ? .reset(code: 7) : nil }),
        (
            "GOAWAY",
            { (chance: inout SeededChance) in chance.next() % 20 == 0 ? .goAway(.init(last: .thisNotProcessed)) : nil }
        ),
        ("lost responses", { (chance: inout SeededChance) in chance.next() % 40 == 0 ? .reset(code: 2) : nil }),
    ]

    private let seed: UInt64
    private let board: FaultBoard
    private let stage: SendingStage
    /// Each daemon has its own file of the disturbed credential's key.
    private let folders: [TemporaryDirectory]
    private let (rightKey, wrongKey): (String, String)
    /// The settings of the other credential.
    private let calmCredential: [String]

    init() throws {
        seed = Seed.next(function: "every request ends once, calm topics")
        let board = FaultBoard(seed: seed)
        self.board = board
        let files = try SendingStage.authority.get()
        let calm = try files.makeKey(id: "CALM123456", team: "TEAM123456")
        stage = try SendingStage { options in
            options.signingKeys.append(calm.key)
            options.records = .counts
            options.log = { board.note($0) }
        } answer: {
            board.answer($0)
        }
        calmCredential = [
            "credential.calm.key_file=\(calm.file)", "credential.calm.key_id=\(calm.key.id)",
            "credential.calm.team_id=\(calm.key.team)", "credential.calm.topics=com.calm.*",
        ]
        rightKey = try String(contentsOfFile: files.signingKeyFile, encoding: .utf8)
        wrongKey = try String(contentsOfFile: files.makeKey(id: "WRONG12345", team: "TEAM123456").file, encoding: .utf8)
        folders = try (0..<3).map { _ in try TemporaryDirectory() }
        for host in folders.indices { try give(rightKey, to: host) }
    }

    private func give(_ key: String, to host: Int) throws { _ = try folders[host].write(key, to: "key.p8") }

    private func daemon(_ number: Int) throws -> DaemonProcess {
        try stage.daemon(
            ["credential.main.key_file=\(folders[number].path)/key.p8", "send.max_in_flight=50"] + calmCredential,
            timing: Soak.isWhole ? 1 : 0.05)
    }

    private static let topics = (disturbed + calm).joined(separator: ",")

    /// Records each request's final outcome. Not every result is final: after a 500, the request is tried again.
    private func noteEnds() throws {
        try stage.database.psql(
            """
            CREATE TABLE asked (apns_id uuid PRIMARY KEY, topic text, token text, at timestamptz);
            CREATE TABLE ended (apns_id uuid, how text, at timestamptz);
            CREATE FUNCTION note_end() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
                BEGIN
                    INSERT INTO public.ended VALUES (new.apns_id::uuid,
                        coalesce(to_jsonb(new) ->> 'error', to_jsonb(new) ->> 'status', 'suppressed'), clock_timestamp());
                    RETURN NULL;
                END $$;
            CREATE TRIGGER note_end AFTER INSERT ON tokenkeeper.send_result FOR EACH ROW
                WHEN (new.status IN ('200', '410') OR new.body LIKE '%BadDeviceToken%') EXECUTE FUNCTION note_end();
            CREATE TRIGGER note_end AFTER INSERT ON tokenkeeper.failed_send FOR EACH ROW EXECUTE FUNCTION note_end();
            CREATE TRIGGER note_end AFTER INSERT ON tokenkeeper.suppressed_send FOR EACH ROW EXECUTE FUNCTION note_end();
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), t))
            FROM generate_series(1, \(Self.tokens)) AS i, unnest('{\(Self.topics)}'::text[]) AS t
            """, user: "postgres")
    }

    /// Queues ten requests for each topic, for random tokens.
    ///
    /// - Parameter first: The first token; 5 leaves out the odd ones.
    private func enqueue(from first: Int = 1) throws {
        try stage.database.psql(
            """
            WITH queued AS (
                INSERT INTO tokenkeeper.send_request (topic, token, payload)
                SELECT t, lpad(to_hex(\(first) + floor(random() * \(Self.tokens - first + 1))::int), 64, '0'), '{"aps":{"alert":"Hello"}}'
                FROM unnest('{\(Self.topics)}'::text[]) AS t, generate_series(1, 10) AS i
                RETURNING apns_id, topic, token)
            INSERT INTO public.asked SELECT apns_id, topic, token, clock_timestamp() FROM queued
            """, user: "postgres")
    }

    private struct Hosts {
        var daemons: [DaemonProcess]
        /// Which one has a wrong key, and the step at which it gets the right one.
        var sick: (host: Int, end: Int)?
    }

    /// Begins a fault, or none.
    ///
    /// - Parameter end: The step at which it ends, if it lasts.
    /// - Returns: Its name.
    private func begin(_ hosts: inout Hosts, end: Int, _ chance: inout SeededChance) throws -> String? {
        let host = Int.random(in: 0..<3, using: &chance)
        switch Int.random(in: 0..<Soak.size(32, whole: 64), using: &chance) {
        case 0..<5:
            let kind = Self.ofTopics.randomElement(using: &chance)!
            board.add(
                Fault(
                    name: kind.name, topic: Self.disturbed.randomElement(using: &chance), answer: kind.answer, end: end)
            )
            return kind.name
        case 5..<16:
            let kind = Self.ofCredentials.randomElement(using: &chance)!
            board.add(Fault(name: kind.name, topic: nil, answer: kind.answer, end: end))
            return kind.name
        case 16..<19 where hosts.sick == nil:
            hosts.sick = (host, end)
            try give(wrongKey, to: host)
            return "a wrong key"
        case 19:
            hosts.daemons[host].signal(SIGKILL)
            #expect(hosts.daemons[host].wait() == -SIGKILL)
            hosts.daemons[host] = try daemon(host)
            return "kill -9"
        case 20:
            stage.apns.dropConnections()
            return "lost connections"
        default: return nil
        }
    }

    private func end(at step: Int, _ hosts: inout Hosts) throws {
        board.remove(endedBy: step)
        guard let sick = hosts.sick, sick.end <= step else { return }
        try give(rightKey, to: sick.host)
        hosts.sick = nil
    }

    private static let notOdd = "right(token, 4) NOT IN ('0001', '0002', '0003', '0004')"

    @Test func `every request ends once, calm topics go on, and nothing pauses after the last fault`() throws {
        defer { stage.apns.stop() }
        var chance = SeededChance(seed: seed)
        try noteEnds()
        var hosts = Hosts(daemons: try (0..<3).map { try daemon($0) })
        var faults: [String: Int] = [:]
        let campaigns = try (Self.disturbed + Self.calm).map { topic in
            try stage.database.psql(
                "SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"All\"}}', '\(topic)', everyone => true)",
                user: "a_sender")
        }
        let began = ContinuousClock.now
        for step in 1...Soak.size(60, whole: 3600) {
            try end(at: step, &hosts)
            let end = step + Int.random(in: 1...Soak.size(8, whole: 60), using: &chance)
            if let name = try begin(&hosts, end: end, &chance) { faults[name, default: 0] += 1 }
            try enqueue()
            if Soak.isWhole {
                // The pace of the load.
                usleep(UInt32(max(0, ContinuousClock.now.duration(to: began + .seconds(step)).microseconds)))
            } else {
                try eventually("calm topics go on beside \(board.names), seed \(seed)") {
                    try stage.count("send_request", "topic LIKE 'com.calm.%' AND attempts = 0 AND \(Self.notOdd)") == 0
                }
            }
        }
        try end(at: .max, &hosts)
        let over = ContinuousClock.now
        try eventually("nothing pauses five minutes after the last fault, seed \(seed)", within: 300) {
            // Without requests, there is nothing to try.
            if try stage.count("send_request", "claimed_by IS NULL AND scheduled_at IS NULL") == 0 { try enqueue() }
            let living = hosts.daemons.map { "daemon_id LIKE '%/\($0.pid)/%'" }.joined(separator: " OR ")
            return try stage.count("sending_daemon", "problems <> '{}' AND (\(living))") == 0
        }
        let healed = over.duration(to: .now)
        try eventually("all requests have ended, seed \(seed)", within: SendingStage.longest) {
            // A server's error waits for an hour at most, and an odd request for five minutes.
            try stage.database.psql(
                "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND isfinite(scheduled_at)"
            )
            // As long as nothing else is accepted, they do not fail.
            let waiting = try stage.count("send_request")
            if waiting > 0, try stage.count("send_request", Self.notOdd) == 0 { try enqueue(from: 5) }
            return try waiting == 0 && stage.count("campaign", "state <> 'ended'") == 0
        }
        try stage.settled()
        for daemon in hosts.daemons { #expect(daemon.stop() == 0) }
        for campaign in campaigns {
            var ends = try stage.progress(Int(campaign) ?? 0)
            #expect(ends.removeValue(forKey: "addressed") == Self.tokens)
            #expect(
                ends.values.reduce(0, +) == Self.tokens && ends["accepted"] ?? 0 >= Self.tokens * 9 / 10,
                "seed \(seed): \(ends)")
        }
        try judge()
        print("healed within \(healed); faults: \(faults.sorted { $0.key < $1.key }.map { "\($0.key) \($0.value)" })")
    }

    private func judge() throws {
        func ask(_ query: String) throws -> String { try stage.database.psql(query, user: "postgres") }
        let unequal = try ask(
            """
            SELECT string_agg(topic || ' ' || token || ' ' || coalesce(how, 'never'), E'\\n')
            FROM asked LEFT JOIN (SELECT apns_id, count(*) AS n, string_agg(how, ', ') AS how FROM ended GROUP BY 1) AS e USING (apns_id)
            WHERE n IS DISTINCT FROM 1
            """)
        #expect(unequal == "", "seed \(seed): each request ends in exactly one way")
        let wrong = try ask(
            """
            SELECT string_agg(DISTINCT topic || ' ' || right(token, 4) || ' ' || how, E'\\n') FROM asked JOIN ended USING (apns_id)
            WHERE how <> '200' AND \(Self.notOdd) AND how NOT LIKE 'it was interrupted twice%'
            """)
        #expect(wrong == "", "seed \(seed): only odd requests fail")
        let twice = board.acceptedTwice
        #expect(twice.unexplained == 0, "seed \(seed): accepted twice, although the first connection went on")
        let share = try ask(
            """
            SELECT round(avg((e.at < a.at + interval '2 seconds')::int), 4) FROM asked AS a JOIN ended AS e USING (apns_id)
            WHERE topic LIKE 'com.calm.%' AND \(Self.notOdd)
            """)
        let ends = try ask(
            "SELECT string_agg(n || ' ' || how, ', ' ORDER BY n DESC) FROM (SELECT count(*) AS n, how FROM ended GROUP BY 2) AS e"
        )
        print("\(ends); \(twice.all) accepted twice; \(share) of the calm requests ended within two seconds")
        if Soak.isWhole { #expect(Double(share) ?? 0 > 0.9) }
    }
}

/// What fails, and how.
private struct Fault: Sendable {
    let name: String
    /// Nil for all topics of the disturbed credential.
    let topic: String?
    let answer: @Sendable (inout SeededChance) -> FakeAnswer?
    /// The step at which it ends.
    let end: Int

    func concerns(_ request: FakeRequest) -> Bool {
        topic.map { request.topic == $0 } ?? (request.topic?.hasPrefix("com.example.") == true)
    }
}

/// The faults of the moment, and what the fake has accepted.
private final class FaultBoard: Sendable {
    /// What some tokens get in every topic, whatever else happens.
    private static let odd: [String: FakeAnswer] = [
        SendingStage.token(1): .refused(400, "TopicDisallowed"),
        SendingStage.token(2): .refused(403, "InvalidProviderToken"),
        SendingStage.token(3): .refused(400, "SomethingNew"), SendingStage.token(4): .refused(400, "BadDeviceToken"),
    ]

    private struct State {
        var faults: [Fault] = []
        /// The connection over which a request was accepted first, by `apns-id`.
        var accepted: [String: Int] = [:]
        /// The connection of the first time, and the ordinal of the second.
        var twice: [(connection: Int, again: Int)] = []
        /// The last request of each connection.
        var last: [Int: Int] = [:]
    }

    private let state = Mutex(State())
    private let seed: UInt64

    init(seed: UInt64) { self.seed = seed }

    var names: [String] { state.withLock { $0.faults.map { "\($0.name) \($0.topic ?? "")" } } }

    func add(_ fault: Fault) { state.withLock { $0.faults.append(fault) } }

    func remove(endedBy step: Int) { state.withLock { $0.faults.removeAll { $0.end <= step } } }

    func answer(_ request: FakeRequest) -> FakeAnswer? {
        if let odd = request.token.flatMap({ Self.odd[$0] }) { return odd }
        var chance = SeededChance(seed: seed &+ UInt64(request.ordinal))
        for fault in state.withLock(\.faults) where fault.concerns(request) {
            if let answer = fault.answer(&chance) { return answer }
        }
        return nil
    }

    func note(_ exchange: FakeExchange) {
        let request = exchange.request
        state.withLock { state in
            state.last[request.connection] = request.ordinal
            guard exchange.outcome == FakeOutcome(200) else { return }
            if let first = state.accepted[request.apnsID] { state.twice.append((first, request.ordinal)) }
            state.accepted[request.apnsID] = request.connection
        }
    }

    /// How many requests were accepted twice, and how many of these although the first connection went on.
    var acceptedTwice: (all: Int, unexplained: Int) {
        state.withLock { state in
            (state.twice.count, state.twice.filter { state.last[$0.connection] ?? 0 > $0.again }.count)
        }
    }
}
