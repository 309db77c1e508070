import APNsFeedback
import Foundation
import LedgerTestSupport
import Logging
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// The parts of the sender, tested one by one.
@Suite(.ownThread) struct `Sending, rule by rule` {
    let topic = TopicScope(environment: "production", topic: "t")

    // The place --------------------------------------------------------------------------------------------------------

    @Test func `a process scope is a boot and a PID namespace, from the unit if /proc hides the boot`() throws {
        let name = ProcessScope.name(environment: ["BOOT_ID": "7f"], daemonID: "host/1/1")
        let space = try FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/ns/pid")
        #expect(name.hasSuffix("/" + space) && name.split(separator: "/").first?.allSatisfy(\.isHexDigit) == true)
        #expect(name != "/" + space && name != "host/1/1")
        #expect(
            ProcessScope.name(environment: [:], daemonID: "host/2/2") == name
                || !FileManager.default.fileExists(atPath: "/proc/sys/kernel/random/boot_id"))
    }

    @Test func `a daemon of this scope is known to have ended`() throws {
        let child = Process()
        child.executableURL = URL(fileURLWithPath: "/bin/sleep")
        child.arguments = ["60"]
        try child.run()
        let number = child.processIdentifier
        #expect(ProcessScope.isAlive("host/\(number)/1") && ProcessScope.isAlive("a/host/with/slashes/\(number)/1"))
        kill(number, SIGKILL)
        child.waitUntilExit()
        #expect(!ProcessScope.isAlive("host/\(number)/1"))
        #expect(!ProcessScope.isAlive("host/\(getpid())/1"), "it had our process number before")
        #expect(ProcessScope.isAlive("host") && ProcessScope.isAlive("host/x/1"), "it cannot be known")
    }

    // The topics that are due ------------------------------------------------------------------------------------------

    @Test func `topics are found page by page, and uncovered ones are listed`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (environment, topic, token, payload) SELECT CASE WHEN i = 1 THEN 'moon' ELSE 'production' END, 't' || i, 'aa', '{}' FROM generate_series(1, 250) AS i"
        )
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        var topics = DueTopics()
        var seen: Set<TopicScope> = []
        var given: Set<TopicScope> = []
        for _ in 1...2 {
            #expect(topics.beginsLook(at: .now) == true)
            repeat {
                let page = try outbox.scopes(after: topics.cursor, on: &daemon)
                topics.add(page) { $0.topic != "t2" && $0.environment != "moon" }
            } while topics.needsAnotherPage
            given.formUnion(topics.claimable)
            seen.formUnion(topics.claimable)
            seen.formUnion(topics.uncovered)
            for topic in topics.claimable { topics.forget(topic) }
        }
        #expect(seen.count == 250)
        #expect(given.contains(.init(environment: "moon", topic: "t1")), "it is invalid, and its requests must fail")
        #expect(given.count == 249)
    }

    @Test func `a claim continues where the last one ended, and starts at the front every few seconds`() {
        var topics = DueTopics()
        let (first, second) = (Instant(microseconds: 1), Instant(microseconds: 2))
        let now = ContinuousClock.now
        #expect(topics.claimsFrom(topic, at: now) == .distantPast)
        topics.claimed(topic, until: first, at: now)
        #expect(topics.claimsFrom(topic, at: now + .seconds(3)) == first)
        topics.claimed(topic, until: second, at: now + .seconds(3))
        #expect(topics.claimsFrom(topic, at: now + .milliseconds(4999)) == second)
        #expect(topics.claimsFrom(topic, at: now + .seconds(5)) == .distantPast, "five seconds after the first")
        topics.claimed(topic, until: first, at: now)
        topics.claimed(topic, until: nil, at: now)
        #expect(topics.claimsFrom(topic, at: now) == .distantPast, "nothing was due")
    }

    @Test func `a claimed request is recalled once it is deleted or taken over, or its topic is paused`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, environment, token, payload) SELECT t, NULL, 'aa', '{\"aps\":{\"alert\":\"1\"}}' FROM unnest('{t,t,t,u}'::text[]) AS t"
        )
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        for topic in ["t", "u"] {
            _ = try outbox.claim(
                .init(environment: "production", topic: topic), most: 9, backgroundPerHour: 0, on: &daemon)
        }
        #expect(try outbox.recalled(among: [1, 2, 3, 4], on: &daemon).isEmpty)
        try database.psql(
            """
            DELETE FROM tokenkeeper.send_request WHERE request_id = 1;
            UPDATE tokenkeeper.send_request SET claimed_by = 'other/1/1' WHERE request_id = 2;
            SELECT tokenkeeper.pause_sending('u')
            """)
        let recalled = try outbox.recalled(among: [1, 2, 3, 4], on: &daemon)
        #expect(recalled.gone == [1, 2] && recalled.paused == [4])
        #expect(try outbox.recalled(among: [3], on: &daemon).isEmpty)
    }

    // What is in flight -----------------------------------------------------------------------------------------------

    @Test func `requests claimed by a COMMIT whose response was lost go back`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 't', 'aa', '{}' FROM generate_series(1, 3)"
        )
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        #expect(try outbox.claim(topic, most: 2, backgroundPerHour: 0, on: &daemon).requests.count == 2)
        var pipeline = SendPipeline(
            [], EndedClients(), limit: 10, timing: .production, marks: nil, capacity: 0, audiences: SlowAudiences(),
            summary: SendSummary(logger: Logger(label: "test")),
            metrics: SendMetrics())
        try pipeline.reconcile(outbox, on: &daemon)
        #expect(!pipeline.isEmpty)
        // Another session locks one of them for a while.
        var other = try database.connect()
        try other.execute("BEGIN; SELECT FROM tokenkeeper.send_request FOR UPDATE")
        let policy = RetryPolicy(retryFor: .seconds(86_400))
        #expect(try !pipeline.finish(by: policy, outbox, on: &daemon) && !pipeline.isEmpty)
        try other.execute("COMMIT")
        try eventually("it is tried again") { try pipeline.finish(by: policy, outbox, on: &daemon) }
        #expect(pipeline.isEmpty)
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.send_request WHERE claimed_by IS NULL AND attempts = 0 AND interruptions = 0"
            )
                == "3")
    }
}
