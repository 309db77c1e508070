import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

/// A daemon that is killed again and again, within seconds.
@Suite(.ownThread) struct `Sending after several kills` {
    /// Kills a daemon, and waits until it is gone.
    private func kill(_ daemon: DaemonProcess) {
        daemon.signal(SIGKILL)
        #expect(daemon.wait() == -SIGKILL)
    }

    private func claims(_ stage: SendingStage, _ condition: String = "true") throws -> Int {
        try stage.count("send_request", "claimed_by IS NOT NULL AND \(condition)")
    }

    @Test func `while APNs cannot be reached, three kills in a row cost no request anything`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        // It accepts connections and never answers a handshake, so requests stay in the client.
        let silent = try LoopbackListener()
        try stage.register(1...500)
        try stage.enqueue()
        try stage.enqueue("tags => '{World}', push_type => 'background'", payload: #"{"aps":{"content-available":1}}"#)
        for number in 1...3 {
            let daemon = try stage.daemon(["send.production_server=localhost:\(silent.port)"])
            try eventually("it has claimed the requests") {
                let holder = try stage.database.psql("SELECT DISTINCT claimed_by FROM tokenkeeper.send_request")
                return try holder.contains("/\(daemon.pid)/") && claims(stage) >= 900
            }
            kill(daemon)
            #expect(try stage.count("send_request", "interruptions = 0 AND attempts = 0") == 1000, "kill \(number)")
        }
        #expect(stage.marked.count == 3)
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(try stage.count("failed_send") == 0 && stage.count("suppressed_send") == 0)
        #expect(stage.sends.count == 1000 && stage.sends.values.allSatisfy { $0 == 1 })
        #expect(
            try stage.database.psql("SELECT max(cardinality(sent_at)) FROM tokenkeeper.background_send") == "1",
            "the share of background pushes was used once")
        #expect(daemon.logged.contains("in_flight=0"))
        // A minute later nobody needs the marks of the killed daemons.
        try stage.database.psql(
            "UPDATE tokenkeeper.sending_daemon SET heartbeat_at = heartbeat_at - interval '2 minutes' WHERE daemon_id NOT LIKE '%/\(daemon.pid)/%'",
            user: "postgres")
        try eventually("they are removed") { stage.marked.count == 1 }
        #expect(daemon.stop() == 0)
        #expect(stage.marked == [], "a regular stop removes its own")
    }

    @Test func `what was sent before two kills fails, and what was not sent arrives once`() throws {
        let answers = Atomic(false)
        let stage = try SendingStage {
            $0.maximumStreams = 20
        } answer: { request in
            // Each connection needs an answer to its first request before it opens more streams.
            answers.load(ordering: .relaxed) || request.stream == 1 ? nil : .never
        }
        defer { stage.apns.stop() }
        try stage.register(1...300)
        try stage.enqueue()
        var seen = 0
        for _ in 1...2 {
            let daemon = try stage.daemon(["send.max_connections=1"])
            try eventually("all streams are used") { stage.apns.records.streams == 20 }
            try eventually("the answer is written") { try stage.count("send_request") == 300 - seen - 1 }
            seen += 1
            #expect(try claims(stage) >= 290)
            kill(daemon)
            try eventually("the connection is gone") { stage.apns.records.openConnections == 0 }
        }
        let sent = stage.sends
        let answered = Set(stage.apns.records.exchanges.filter { $0.outcome.status == 200 }.map(\.request.apnsID))
        answers.store(true, ordering: .relaxed)
        let daemon = try stage.daemon(["send.max_connections=1"])
        try stage.settled()
        #expect(daemon.stop() == 0)
        // The first request of the second daemon was answered.
        let twice = Set(sent.filter { $0.value == 2 }.keys).subtracting(answered)
        let failed = Set(
            try stage.database.psql("SELECT apns_id FROM tokenkeeper.failed_send").split(separator: "\n").map(
                String.init))
        #expect(failed == twice && failed.count >= 10, "\(failed.count) failed, \(twice.count) were sent twice")
        #expect(try stage.count("failed_send", "error NOT LIKE '%may have been delivered%'") == 0)
        for (id, count) in stage.sends {
            let before = sent[id] ?? 0
            if before == 0 { #expect(count == 1, "what was not sent arrives once") }
            #expect(count <= 2)
        }
        #expect(stage.sends.count == 300)
        #expect(try stage.results(200) == 300 - failed.count)
    }

    @Test func `a response that was received and not written counts as sent`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        // Endings cannot be written. A sequence counts the attempts, whatever is rolled back.
        try stage.database.psql(
            """
            CREATE SEQUENCE public.refusals;
            GRANT USAGE ON SEQUENCE public.refusals TO PUBLIC;
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM nextval('public.refusals'); RAISE 'locked' USING errcode = 'lock_not_available'; END $$;
            CREATE TRIGGER refuse BEFORE DELETE ON tokenkeeper.send_request FOR EACH ROW EXECUTE FUNCTION public.refuse()
            """, user: "postgres")
        try stage.register(1...50)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try eventually("all are answered") { stage.apns.records.count(200) == 50 }
        func refusals() throws -> Int {
            Int(try stage.database.psql("SELECT last_value FROM public.refusals", user: "postgres")) ?? 0
        }
        let before = try refusals()
        try eventually("it has the answers and cannot write them") { try refusals() > before + 3 }
        kill(daemon)
        try stage.database.psql("DROP TRIGGER refuse ON tokenkeeper.send_request", user: "postgres")
        let next = try stage.daemon()
        try stage.settled()
        #expect(next.stop() == 0)
        #expect(next.logged.contains("in_flight=50 requests=50"), "\(next.logged)")
        #expect(stage.sends.count == 50 && stage.sends.values.allSatisfy { $0 == 2 })
    }

    @Test func `without marks, all that a killed daemon had claimed counts as sent`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let silent = try LoopbackListener()
        try stage.register(1...50)
        try stage.enqueue()
        for _ in 1...2 {
            let daemon = try stage.daemon([
                "send.production_server=localhost:\(silent.port)", "runtime_directory=/nonexistent",
            ])
            try eventually("it has claimed the requests") {
                let holder = try stage.database.psql("SELECT DISTINCT claimed_by FROM tokenkeeper.send_request")
                return try holder.contains("/\(daemon.pid)/") && claims(stage) == 50
            }
            #expect(daemon.logged.contains("cannot mark which requests it sends"))
            kill(daemon)
        }
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(try stage.count("failed_send", "error LIKE '%may have been delivered'") == 50)
        #expect(daemon.stop() == 0)
    }
}
