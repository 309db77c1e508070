import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// Something other than a lock that keeps results waiting.
struct QueueFault: Sendable, CustomTestStringConvertible {
    var testDescription: String
    /// As a superuser.
    var begins: String
    var ends: String
    var cause: String
    var log: String?

    static let all = [
        QueueFault(
            testDescription: "a missing right",
            begins: "REVOKE INSERT ON tokenkeeper.result_count FROM tokenkeeper_daemon",
            ends: "GRANT INSERT ON tokenkeeper.result_count TO tokenkeeper_daemon",
            cause: "permission denied for table result_count (SQLSTATE 42501)"),
        QueueFault(
            testDescription: "a full disk",
            begins: """
                CREATE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN RAISE 'could not extend file: No space left on device' USING errcode = '53100'; END $$;
                CREATE TRIGGER full_disk BEFORE UPDATE ON tokenkeeper.ledger FOR EACH ROW EXECUTE FUNCTION public.full()
                """,
            ends: "DROP TRIGGER full_disk ON tokenkeeper.ledger",
            cause: "could not extend file: No space left on device (SQLSTATE 53100)"),
    ]
}

/// Something that keeps a single request from being sent.
struct SendFault: Sendable, CustomTestStringConvertible {
    var testDescription: String
    /// Settings that replace the right ones.
    var settings: [String]
    var cause: String
    var help: String

    static let all = [
        SendFault(
            testDescription: "no authority for the server's certificate",
            settings: ["send.ca_file={another authority}"],
            cause: "requests cannot be sent (main, production), and wait: ",
            help: "install the package ca-certificates, or set send.ca_file"),
        SendFault(
            testDescription: "no server at the port",
            settings: ["send.production_server=127.0.0.1:1"],
            cause: "requests cannot be sent (main, production), and wait: ",
            help: "allow TCP connections to APNs (port 443) in the firewall, or set send.proxy"),
        SendFault(
            testDescription: "no address for the name",
            settings: ["send.production_server=apns.invalid:443"],
            cause: "requests cannot be sent (main, production), and wait: ", help: "check the DNS of this machine"),
    ]
}

@Suite(.ownThread) struct `A fault is in the log, in Status and in the view until it is gone` {
    @Test(arguments: QueueFault.all) func `that keeps results waiting`(_ fault: QueueFault) throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.database.psql(fault.begins, user: "postgres")
        try stage.queueResults()
        try stage.start()
        try stage.reports(fault.cause)
        #expect(stage.log.contains("level=error msg=\"PostgreSQL refuses"))
        try stage.database.psql(fault.ends, user: "postgres")
        try stage.isOver(fault.cause)
        try eventually("the log says that it is over") { stage.log.contains("PostgreSQL is back") }
        stage.stop()
    }

    @Test(arguments: SendFault.all) func `that keeps a single request waiting`(_ fault: SendFault) throws {
        let sending = try SendingStage()
        defer { sending.apns.stop() }
        let stage = try FaultStage(sending.database)
        try sending.register(1...1)
        try sending.enqueue()
        let stranger = try TestAuthority()
        defer { try? FileManager.default.removeItem(atPath: stranger.folder) }
        let settings = fault.settings.map { $0.replacing("{another authority}", with: stranger.certificate) }
        try stage.start(
            sending.servers + sending.key + settings, environment: ["RUNTIME_DIRECTORY": sending.runtime.path])
        try stage.reports(fault.cause)
        try stage.reports(fault.help)
        try eventually("the request is deleted") {
            try sending.database.psql(
                "DELETE FROM tokenkeeper.send_request WHERE claimed_by IS NULL", user: "a_operator")
            return try sending.count("send_request") == 0
        }
        try eventually("the log says that it is over") { stage.log.contains("this no longer keeps requests waiting") }
        try stage.isOver(fault.cause)
        stage.stop()
    }

    @Test func `results that have been waiting for longer than five minutes are in the log once, and their end too`()
        throws
    {
        let stage = try FaultStage(try TestCluster.shared.database())
        var holder = try stage.database.connect()
        try holder.execute("BEGIN; LOCK TABLE tokenkeeper.ledger IN SHARE MODE")
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, queued_at)
            VALUES ('t', 'aa', 410, '{"reason":"Unregistered","timestamp":1740000000123}', '2026-01-02 03:04:05Z')
            """)
        try stage.start()
        let words = "results have been waiting for longer than five minutes"
        try stage.reports("tokenkeeper.ledger is locked (SHARE) by pid")
        try eventually("the log has the age and the cause") {
            stage.log.split(separator: "\n").contains {
                $0.contains(words) && $0.contains("oldest=\"2026-01-02 03:04:05 UTC\"")
                    && $0.contains("because=\"of a lock in PostgreSQL: tokenkeeper.ledger is locked (SHARE) by pid")
            }
        }
        #expect(
            stage.status.contains("1 result is queued, the oldest since 2026-01-02 03:04:05 UTC"), "\(stage.status)")
        #expect(
            try stage.view.contains("\(words), because of a lock in PostgreSQL: tokenkeeper.ledger is locked (SHARE)"))
        try holder.execute("ROLLBACK")
        try eventually("the log has the end") {
            stage.log.contains("level=notice msg=\"no result has been waiting for longer than five minutes any more\"")
        }
        try stage.isOver(words)
        #expect(stage.log.components(separatedBy: "level=warning msg=\"\(words)\"").count == 2, "logged once")
        stage.stop()
    }
}

@Suite(.ownThread) struct `All is well is not said` {
    @Test func `while requests wait and nobody sends them`() throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at)
            SELECT 't', lpad(to_hex(i), 8, '0'), '{"aps":{"alert":"1"}}', '2026-01-02 03:04:05Z' FROM generate_series(1, 17000) AS i
            """)
        try stage.start()
        try eventually("Status: has their number and age") {
            stage.status.contains("10000 or more requests are queued, the oldest due since 2026-01-02 03:04:05 UTC")
        }
        #expect(
            stage.status.contains("because no running daemon sends") && stage.status.contains("0 results are queued"))
        stage.stop()
    }

    @Test func `while sending is paused, and of several warnings the first and their number are said`() throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.database.psql("SELECT tokenkeeper.ensure_topic('production', t) FROM unnest('{t,u}'::text[]) AS t")
        try stage.database.psql("SELECT tokenkeeper.pause_sending('t', 'production', 'a test')", user: "a_operator")
        try stage.start()
        try eventually("Status: says so") { stage.status.hasPrefix("sending to t (production) is paused since 20") }
        try stage.database.psql("SELECT tokenkeeper.pause_sending('u', 'production', 'a test')", user: "a_operator")
        try eventually("Status: says how many there are") {
            stage.status.contains("; 2 warnings, see `tokenkeeperd status`")
        }
        try stage.database.psql(
            "SELECT tokenkeeper.resume_sending(t) FROM unnest('{t,u}'::text[]) AS t", user: "a_operator")
        try stage.isOver("is paused")
        stage.stop()
    }

    @Test func `while a guard is tripped and holds results`() throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z')) FROM generate_series(1, 200) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(1, 200) AS i
            """)
        try stage.start()
        try stage.reports("the mass-failure guard of t (production) tripped", log: "the mass-failure guard has tripped")
        stage.stop()
    }

    @Test func `while the last sweep has refused`() throws {
        let stage = try FaultStage(try TestCluster.shared.database())
        try stage.database.psql(
            """
            SELECT count(tokenkeeper.unregister(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 2000) AS i;
            UPDATE tokenkeeper.suppression SET since = now() - interval '400 days'
            """)
        try stage.start(["sweep.prune_allowance=1"])
        try stage.database.psql("SELECT tokenkeeper.request_sweep()", user: "a_operator")
        try stage.reports("the last sweep refused to prune 2000 of the", log: "the sweep refused to prune")
        stage.stop()
    }
}
