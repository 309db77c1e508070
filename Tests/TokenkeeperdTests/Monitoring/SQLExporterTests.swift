import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// `monitoring/sql_exporter.yml`, with Debian's exporter.
@Suite(.ownThread) struct `The SQL exporter` {
    /// As people install it, except for the connection and the pause.
    private func configuration(_ database: TestDatabase) throws -> String {
        let file = try PackagedProgram.monitoring("sql_exporter.yml")
        let connection = "postgres://sql_exporter@/push?host=/var/run/postgresql&sslmode=disable"
        let here =
            "postgres://a_monitor@/\(database.name)?host=\(database.cluster.folder)&port=\(database.cluster.port)&sslmode=disable"
        #expect(file.contains(connection) && file.contains("interval: 15s"))
        return file.replacing(connection, with: here).replacing("interval: 15s", with: "interval: 1s")
    }

    @Test func `each of its queries has a result, with the rights of tokenkeeper_monitor alone`() throws {
        let database = try TestCluster.shared.database()
        let daemon = try DaemonProcess(database.url(), settings: ["guard.allowance=5", "guard.max_share=1%"])
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 't', registered_at => '2026-01-01Z')) FROM generate_series(1, 100) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 64, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(1, 20) AS i;
            INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'no hex'), ('t', 'none, too');
            WITH files AS (SELECT tokenkeeper.begin_import('devices.csv') AS source_id)
            INSERT INTO tokenkeeper.registration (topic, token, unregistered, source_id)
            SELECT 't', lpad(to_hex(i), 64, '0'), true, f.source_id FROM files AS f CROSS JOIN generate_series(21, 27) AS i;
            SELECT tokenkeeper.pause_sending('t');
            SELECT tokenkeeper.enqueue('{"aps":{"alert":"A"}}', 't', tags => 'none');
            """)
        try eventually("the guards have tripped, and a sweep has finished") {
            try database.psql(
                """
                SELECT EXISTS (SELECT FROM tokenkeeper.guard WHERE tripped) AND EXISTS (SELECT FROM tokenkeeper.held_registration)
                       AND EXISTS (SELECT FROM tokenkeeper.rejected_registration)
                       AND EXISTS (SELECT FROM tokenkeeper.sweep_run WHERE outcome = 'finished')
                """) == "t"
        }
        try database.psql(
            """
            INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused)
            SELECT max(run_id), 'production', 't', 'stale', 7, true FROM tokenkeeper.sweep_run WHERE outcome = 'finished'
            """)
        let configuration = try configuration(database)
        let names = configuration.matches(of: #/- name: (tokenkeeper_\w+)/#).map { String($0.output.1) }
        #expect(names.count == 10)
        let exporter = try PackagedProgram("prometheus-sql-exporter", files: ["sql_exporter.yml": configuration]) {
            ["-config.file=\($0)/sql_exporter.yml", "-web.listen-address=127.0.0.1:\($1)"]
        }
        var page = ""
        func value(_ name: String, _ labels: String) -> String? {
            page.split(separator: "\n").first { line in
                line.hasPrefix("sql_\(name){") && labels.split(separator: ",").allSatisfy(line.contains)
            }.flatMap { $0.split(separator: " ").last.map(String.init) }
        }
        do {
            try eventually("each query has a result") {
                page = exporter.get("/metrics")
                return names.allSatisfy { page.contains("sql_\($0){") }
            }
        } catch {
            throw TestFailure("\(error): \(names.filter { !page.contains("sql_\($0){") }) \(exporter.log.suffix(2000))")
        }
        #expect(
            !exporter.log.contains(#""level":"error""#) && !exporter.log.contains(#""level":"warn""#), "\(exporter.log)"
        )
        #expect(value("tokenkeeper_status", #"figure="live_daemons""#) == "1")
        #expect(value("tokenkeeper_status", #"figure="queue_registrations""#) != nil)
        #expect(value("tokenkeeper_status", #"figure="held_registrations""#) == "7")
        #expect(value("tokenkeeper_status", #"figure="rejected_registrations""#) == "2")
        #expect(value("tokenkeeper_status", #"figure="open_campaigns""#) == "1")
        #expect(value("tokenkeeper_campaign_requests", #"col="waiting",environment="production",topic="t""#) == "0")
        #expect(value("tokenkeeper_guard", #"col="tripped",topic="t""#) == "1")
        #expect(value("tokenkeeper_sweep_refused", #"topic="t""#) == "7")
        #expect(value("tokenkeeper_results_last_hours", #"status="400",reason="BadDeviceToken""#) != nil)
        #expect(daemon.stop() == 0)
    }
}
