import Foundation
import LedgerTestSupport

extension ExtremesMeasurement {
    /// The view `status` with thousands of topics, and with the dead rows that a large campaign leaves in the outbox until a
    /// vacuum.
    func status(_ database: Database) throws {
        let session = try database.session()
        let requests = size(4_000_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) SELECT 'production', 't' || i FROM generate_series(1, 3000) AS i;
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            SELECT t.topic_id, true, s, 100
            FROM tokenkeeper.topic AS t, unnest('{active,stale,suspect,superseded,unregistered_by_app}'::text[]) AS s;
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
            SELECT date_trunc('hour', now()) - h * interval '1 hour', 'production', t.topic, s, 100
            FROM tokenkeeper.topic AS t, generate_series(0, 240) AS h, unnest('{200,410}'::integer[]) AS s;
            ALTER TABLE tokenkeeper.send_request SET (autovacuum_enabled = off);
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 't1', md5(i::text), '{"aps":{"alert":"Breaking news: something has happened somewhere, read all about it"}}'
            FROM generate_series(1, \(requests)) AS i;
            DELETE FROM tokenkeeper.send_request
            """)
        let daemons = try MeasuredDaemon.start(on: database)
        defer { for daemon in daemons { daemon.stop() } }
        let start = ContinuousClock.now
        while try session.number("SELECT count(*) FROM tokenkeeper.status_cache WHERE source = 'send_request'") == 0 {
            if start.duration(to: .now) > .seconds(60) { throw TestFailure("no daemon has looked within a minute") }
            usleep(50_000)
        }
        var milliseconds: [Double] = []
        for _ in 0..<20 {
            let began = ContinuousClock.now
            try session.run("SELECT * FROM tokenkeeper.status")
            milliseconds.append(began.duration(to: .now) / .milliseconds(1))
        }
        report.compare(
            "status with 3,000 topics, behind \(Scale.short(requests)) dead rows of the outbox", Spread(milliseconds),
            atMost: 50, digits: 1, unit: " ms")
    }
}
