import Foundation
import LedgerTestSupport

extension ExtremesMeasurement {
    /// How long a registration waits while a daemon undoes suspects.
    func reinstate(_ database: Database) throws {
        let session = try database.session()
        let tokens = size(300_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'undo');
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, suspect_at, suspect_reason)
            SELECT 1, sha256(i::text::bytea), now() - interval '50 days', now() - interval '1 day', 'BadDeviceToken' FROM generate_series(1, \(tokens)) AS i;
            INSERT INTO tokenkeeper.receipt (topic_id, token_key, cause, invalidated_at, reason, received_at, counted)
            SELECT topic_id, token_key, 'suspect', suspect_at, suspect_reason, suspect_at, true FROM tokenkeeper.ledger;
            SELECT tokenkeeper.recompute_tokens()
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger")
        try session.run("VACUUM (ANALYZE) tokenkeeper.receipt")
        let daemons = try MeasuredDaemon.start(on: database)
        defer { for daemon in daemons { daemon.stop() } }
        let client = try PreparedClient(database)
        try client.prepare("register", "SELECT tokenkeeper.register(encode(sha256($1::text::bytea), 'hex'), 'undo')")
        let start = ContinuousClock.now
        let concerned = try session.number(
            "SELECT tokenkeeper.reinstate('undo', 'production', now() - interval '2 days', now())")
        let returned = start.duration(to: .now) / .milliseconds(1)
        var waits: [Double] = []
        var chance = SeededChance(seed: 1)
        repeat {
            for _ in 0..<50 {
                let began = ContinuousClock.now
                try client.call("register", ["\(Int.random(in: 1...tokens, using: &chance))"])
                waits.append(began.duration(to: .now) / .milliseconds(1))
            }
            if start.duration(to: .now) > .seconds(600) {
                throw TestFailure("not undone within ten minutes: \(daemons[0].logged)")
            }
        } while try session.number("SELECT count(*) FROM tokenkeeper.reinstatement WHERE finished_at IS NULL") > 0
        let took = start.duration(to: .now) / .seconds(1)
        report.compare(
            "reinstate of \(Int(concerned)) suspects: until it returns", Spread([returned]), digits: 0, unit: " ms")
        report.compare("until a daemon has undone them", Spread([took]), digits: 1, unit: " s")
        report.compare(
            "the longest of \(waits.count) registrations meanwhile", Spread([waits.max() ?? .nan]), atMost: 100,
            digits: 0,
            unit: " ms")
        let states = try session.number("SELECT count(*) FROM tokenkeeper.token WHERE sendable")
        report.check(
            "sendable tokens afterwards", "\(Int(states))", target: "\(tokens)", isReached: Int(states) == tokens)
    }
}
