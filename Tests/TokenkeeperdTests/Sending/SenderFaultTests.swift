import APNsFeedback
import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite struct `Faults that a server reports` {
    private let main = CredentialScope(credential: "main", environment: "production")
    private let now = ContinuousClock.now
    private static let certificate = PushGoAway(code: 0, text: #"{"reason":"BadCertificate"}"#)
    private static let calm = PushGoAway(code: 11)

    @Test func `one is logged at once, when it changes, and again after a minute if it came again`() {
        var faults = SenderFaults()
        func logs(_ goAway: PushGoAway, _ count: Int, after seconds: Int) -> Bool {
            faults.take(PushFault(goAway, count: count), of: main, at: now + .seconds(seconds))
        }
        #expect(logs(Self.certificate, 1, after: 0))
        #expect(!logs(Self.certificate, 1, after: 5))
        #expect(!logs(Self.certificate, 9, after: 59))
        #expect(logs(Self.certificate, 9, after: 60))
        #expect(!logs(Self.certificate, 9, after: 600), "an old one")
        #expect(logs(Self.certificate, 10, after: 605))
        #expect(logs(Self.calm, 11, after: 606))
        #expect(!logs(Self.calm, 11, after: 607))
    }

    @Test func `each credential and environment has its own`() {
        var faults = SenderFaults()
        let sandbox = CredentialScope(credential: "main", environment: "sandbox")
        let first = [
            faults.take(PushFault(Self.certificate), of: sandbox, at: now),
            faults.take(PushFault(Self.calm), of: main, at: now),
        ]
        #expect(first == [true, true])
        #expect(
            faults.problems == [
                "APNs ends connections and blames the sender (main, production); check the credential: GOAWAY ENHANCE_YOUR_CALM",
                "APNs ends connections and blames the sender (main, sandbox); check the credential: BadCertificate",
            ])
        let again = faults.take(PushFault(Self.calm, isCurrent: false), of: main, at: now)
        #expect(!again)
        #expect(faults.problems.count == 1 && faults.problems.first?.contains("sandbox") == true)
    }
}

@Suite(.ownThread) struct `GOAWAY` {
    /// - Parameter reason: What the server says when it ends a connection; nil if it answers.
    private func stage(_ reason: @escaping @Sendable () -> String?) throws -> SendingStage {
        try SendingStage { _ in
        } answer: { _ in
            reason().map { .goAway(.init(last: .thisNotProcessed, reason: $0)) }
        }
    }

    private func problems(_ stage: SendingStage) throws -> String {
        try stage.database.psql("SELECT array_to_string(problems, '; ') FROM tokenkeeper.sending_daemon")
    }

    @Test func `that blames the sender is logged, and shown by status until requests are answered`() throws {
        let isRefusing = Atomic(true)
        let stage = try stage { isRefusing.load(ordering: .acquiring) ? "BadCertificate" : nil }
        defer { stage.apns.stop() }
        try stage.register(1...3)
        try stage.enqueue()
        let daemon = try stage.daemon()
        let problem =
            "APNs ends connections and blames the sender (main, production); check the credential: BadCertificate"
        try eventually("it is shown") { try problems(stage).contains(problem) }
        #expect(try stage.database.psql("SELECT warnings::text FROM tokenkeeper.status").contains(problem))
        let line = try #require(
            daemon.logged.split(separator: "\n").first { $0.contains("APNs ends connections and blames the sender") })
        for field in ["level=warning", "credential=main", "environment=production", "reason=BadCertificate"] {
            #expect(line.contains(field), "\(line)")
        }
        isRefusing.store(false, ordering: .releasing)
        try eventually("all are sent") {
            try stage.database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL")
            return try stage.results(200) == 3
        }
        try eventually("it is shown no more") { try !problems(stage).contains("blames") }
        #expect(daemon.stop() == 0)
        #expect(daemon.logged.components(separatedBy: "APNs ends connections").count <= 3, "\(daemon.logged)")
        #expect(try stage.count("failed_send") == 0)
    }

    @Test func `without a reason, or with one of the server's own, is not reported`() throws {
        let count = Atomic(0)
        let stage = try SendingStage { _ in
        } answer: { request in
            guard request.ordinalOfConnection == 10 else { return nil }
            let turn = count.add(1, ordering: .relaxed).newValue
            return .goAway(.init(last: .thisProcessed, reason: turn.isMultiple(of: 2) ? "Shutdown" : nil))
        }
        defer { stage.apns.stop() }
        try stage.register(1...200)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(try stage.results(200) == 200 && stage.apns.records.connections > 10)
        // The beat after the last answer.
        let last = try stage.database.psql("SELECT heartbeat_at FROM tokenkeeper.sending_daemon")
        try eventually("another beat") {
            try stage.database.psql("SELECT heartbeat_at FROM tokenkeeper.sending_daemon") != last
        }
        #expect(try problems(stage) == "")
        #expect(daemon.stop() == 0 && !daemon.logged.contains("blames"))
    }
}
