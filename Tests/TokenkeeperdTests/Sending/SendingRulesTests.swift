import APNsFeedback
import Foundation
import LedgerTestSupport
import Logging
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// The parts of the sending, each by itself.
@Suite struct `Sending, rule by rule` {
    let scope = Outbox.TopicScope(environment: "production", topic: "t")
    let main = SendingHealth.Line(credential: "main", environment: "production")
    let trouble = RetryPolicy.Step(.later(.seconds(900), "503"), .server)

    // The health of the sending ----------------------------------------------------------------------------------------

    @Test func `an answer that was under way when a server's rest began does not end it`() {
        var health = SendingHealth()
        let now = ContinuousClock.now
        for _ in 1...20 { _ = health.note(trouble, of: scope, by: "main", at: now) }
        #expect(health.note(RetryPolicy.Step(.answered), of: scope, by: "main", at: now) == .nothing)
        #expect(health.isLeftInPeace(main, at: now + .seconds(14)))
    }

    @Test func `what asks for a credential's pause while it is under way does not lengthen it`() {
        var health = SendingHealth()
        let now = ContinuousClock.now
        let pause = RetryPolicy.Step(.later(.seconds(1200), "w"), .credential(.seconds(1200)))
        _ = health.note(pause, of: scope, by: "main", at: now)
        #expect(health.note(pause, of: scope, by: "main", at: now + .seconds(60)) == .nothing)
        #expect(!health.isLeftInPeace(main, at: now + .seconds(1200)))
    }

    @Test(arguments: [
        RetryPolicy.Step(.returned(nil)), RetryPolicy.Step(.interrupted(.zero, "stopped")),
        RetryPolicy.Step(.later(.seconds(60), "APNs answered 429 TooManyRequests"), .token),
    ])
    func `what is no answer does not begin the counting anew`(step: RetryPolicy.Step) {
        var health = SendingHealth()
        let now = ContinuousClock.now
        for _ in 1...19 { _ = health.note(trouble, of: scope, by: "main", at: now) }
        _ = health.note(step, of: scope, by: "main", at: now)
        #expect(health.note(trouble, of: scope, by: "main", at: now) == .leaveInPeace(.seconds(15)))
        let fault = RetryPolicy.Step(.failed("w"), .message("w"))
        for _ in 1...19 { _ = health.note(fault, of: scope, by: "main", at: now) }
        _ = health.note(step, of: scope, by: "main", at: now)
        #expect(health.note(fault, of: scope, by: "main", at: now) != .nothing)
    }

    @Test func `five responses in a row that are not from APNs pause their topic, and an answer of APNs starts over`() {
        var health = SendingHealth()
        let now = ContinuousClock.now
        let foreign = RetryPolicy.Step(.later(.seconds(5), "308"), .foreign("308"))
        for _ in 1...4 { #expect(health.note(foreign, of: scope, by: "main", at: now) == .nothing) }
        _ = health.note(RetryPolicy.Step(.answered), of: scope, by: "main", at: now)
        for _ in 1...4 { #expect(health.note(foreign, of: scope, by: "main", at: now) == .nothing) }
        let other = Outbox.TopicScope(environment: "production", topic: "u")
        #expect(health.note(foreign, of: other, by: "main", at: now) == .nothing, "each topic by itself")
        #expect(
            health.note(foreign, of: scope, by: "main", at: now)
                == .pauseTopic(
                    "5 responses in a row are not from APNs, the last: 308; "
                        + "check send.production_server and any proxy between the daemon and APNs"))
        #expect(health.note(foreign, of: scope, by: "main", at: now) == .nothing, "it counts anew")
    }

    // The place --------------------------------------------------------------------------------------------------------

    @Test func `a place is a boot and a space of process numbers, from the unit where /proc shows none`() throws {
        let name = ProcessScope.name(environment: ["BOOT_ID": "7f"], daemonID: "host/1/1")
        let space = try FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/ns/pid")
        #expect(name.hasSuffix("/" + space) && name.split(separator: "/").first?.allSatisfy(\.isHexDigit) == true)
        #expect(name != "/" + space && name != "host/1/1")
        #expect(
            ProcessScope.name(environment: [:], daemonID: "host/2/2") == name
                || !FileManager.default.fileExists(atPath: "/proc/sys/kernel/random/boot_id"))
    }

    @Test func `whether a daemon of this place has ended`() throws {
        let child = Process()
        child.executableURL = URL(fileURLWithPath: "/bin/sleep")
        child.arguments = ["60"]
        try child.run()
        let number = child.processIdentifier
        #expect(ProcessScope.isAlive("host/\(number)/1") && ProcessScope.isAlive("a/host/with/slashes/\(number)/1"))
        kill(number, SIGKILL)
        child.waitUntilExit()
        #expect(!ProcessScope.isAlive("host/\(number)/1"))
        #expect(!ProcessScope.isAlive("host/\(getpid())/1"), "that one was here before us")
        #expect(ProcessScope.isAlive("host") && ProcessScope.isAlive("host/x/1"), "nobody knows")
    }

    // The topics that are due ------------------------------------------------------------------------------------------

    @Test func `topics are looked for in parts, one after the other, and those that nobody covers are told`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (environment, topic, token, payload) SELECT CASE WHEN i = 1 THEN 'moon' ELSE 'production' END, 't' || i, 'aa', '{}' FROM generate_series(1, 250) AS i"
        )
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        var topics = DueTopics()
        var seen: Set<Outbox.TopicScope> = []
        var given: Set<Outbox.TopicScope> = []
        for _ in 1...2 {
            let due = try topics.look(outbox, on: &daemon) {
                $0.topic != "t2" && $0.environment != "moon"
            }
            given.formUnion(due)
            seen.formUnion(due)
            seen.formUnion(topics.uncovered)
            for scope in due { topics.forget(scope) }
        }
        #expect(seen.count == 250)
        #expect(given.contains(.init(environment: "moon", topic: "t1")), "it is no topic, and is to be failed")
        #expect(given.count == 249)
    }

    @Test func `a topic is claimed from where the last claim came to, from its front every few seconds`() {
        var topics = DueTopics()
        let (first, second) = (Instant(microseconds: 1), Instant(microseconds: 2))
        let now = ContinuousClock.now
        #expect(topics.since(scope, at: now) == .distantPast)
        topics.claimed(scope, until: first, at: now)
        #expect(topics.since(scope, at: now + .seconds(3)) == first)
        topics.claimed(scope, until: second, at: now + .seconds(3))
        #expect(topics.since(scope, at: now + .milliseconds(4999)) == second)
        #expect(topics.since(scope, at: now + .seconds(5)) == .distantPast, "five seconds after the first")
        topics.claimed(scope, until: first, at: now)
        topics.claimed(scope, until: nil, at: now)
        #expect(topics.since(scope, at: now) == .distantPast, "nothing was due")
    }

    // What is in hand --------------------------------------------------------------------------------------------------

    @Test func `what was claimed by a COMMIT whose answer was lost goes back`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 't', 'aa', '{}' FROM generate_series(1, 3)"
        )
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        #expect(try outbox.claim(scope, most: 2, backgroundPerHour: 0, on: &daemon).requests.count == 2)
        var pipeline = SendPipeline([], most: 10, summary: SendSummary(logger: Logger(label: "test")))
        try pipeline.reconcile(outbox, on: &daemon)
        #expect(!pipeline.isEmpty)
        // Somebody holds one of them for a while.
        var other = try database.connect()
        try other.execute("BEGIN; SELECT FROM tokenkeeper.send_request FOR UPDATE")
        let policy = RetryPolicy(retryFor: .seconds(86_400))
        #expect(try !pipeline.settle(by: policy, outbox, on: &daemon) && !pipeline.isEmpty)
        try other.execute("COMMIT")
        #expect(try pipeline.settle(by: policy, outbox, on: &daemon) && pipeline.isEmpty)
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.send_request WHERE claimed_by IS NULL AND attempts = 0 AND interruptions = 0"
            )
                == "3")
    }
}
