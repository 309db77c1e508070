extension ExtremesMeasurement {
    /// Suspects of a topic whose tokens are all suppressed and were never registered: a search for an active token finds none.
    func neverRegistered(_ database: Database) throws {
        let session = try database.session()
        let tokens = size(3_000_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'never');
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, suspect_at, suspect_reason)
            SELECT 1, sha256(i::text::bytea), now() - interval '5 days', 'BadDeviceToken' FROM generate_series(1, \(tokens)) AS i
            """)
        try session.run("SELECT tokenkeeper.recompute_tokens()")
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger, tokenkeeper.suppression")
        let daemons = try MeasuredDaemon.start(on: database)
        defer { for daemon in daemons { daemon.stop() } }
        // As a sender queues them: 40 per batch.
        for batch in 0..<25 {
            try session.run(
                """
                INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                SELECT 'never', encode(sha256(('new' || \(batch * 40) + i)::bytea), 'hex'), 400, '\(Self.badToken)' FROM generate_series(1, 40) AS i
                """)
        }
        report(
            "1,000 suspects of a topic of \(Scale.short(tokens)) never-registered tokens, until none is queued",
            try untilQueueIsEmpty(session), target: 5)
    }
}
