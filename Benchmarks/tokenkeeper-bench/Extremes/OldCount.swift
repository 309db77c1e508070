extension ExtremesMeasurement {
    /// The guard's decision when the active tokens were last counted 25 hours ago.
    func oldCount(_ database: Database) throws {
        let session = try database.session()
        let tokens = size(4_000_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'large');
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at)
            SELECT 1, sha256(i::text::bytea), now() - interval '5 days' FROM generate_series(1, \(tokens)) AS i;
            INSERT INTO tokenkeeper.token_count (topic_id, state, tokens, counted_at) VALUES (1, 'active', \(tokens), now() - interval '25 hours')
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger")
        var milliseconds: [Double] = []
        for round in 0..<10 {
            let start = ContinuousClock.now
            try session.run(
                """
                SELECT tokenkeeper.record(ARRAY(
                    SELECT tokenkeeper.invalidation_of(i, 1, sha256(i::text::bytea), 'suspect', now(), 'BadDeviceToken', now())
                    FROM generate_series(\(round * 400 + 1), \(round * 400 + 400)) AS i), 50, 0.005, NULL)
                """)
            milliseconds.append(start.duration(to: .now) / .milliseconds(1))
        }
        report.compare(
            "a batch of 400 suspects of a topic of \(Scale.short(tokens)) tokens, counted 25 hours ago: the slowest of ten",
            Spread([milliseconds.max() ?? .nan]), atMost: 1000, digits: 0, unit: " ms")
    }

    /// The cost per token of counting in slices.
    func count(_ database: Database) throws {
        let session = try database.session()
        let tokens = size(4_000_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'large');
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at)
            SELECT 1, sha256(i::text::bytea), now() - interval '5 days' FROM generate_series(1, \(tokens)) AS i
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger")
        var longest = 0.0
        let start = ContinuousClock.now
        repeat {
            let began = ContinuousClock.now
            try session.run("SELECT tokenkeeper.count_tokens(1, 50000)")
            longest = max(longest, began.duration(to: .now) / .milliseconds(1))
        } while try session.number("SELECT count(*) FROM tokenkeeper.token_count") == 0
        let each = start.duration(to: .now) / .microseconds(1) / Double(tokens)
        report.compare(
            "the count of \(Scale.short(tokens)) tokens in slices of 50,000, a token", Spread([each]), digits: 2,
            unit: " µs")
        report.compare("its longest slice", Spread([longest]), atMost: 1000, digits: 0, unit: " ms")
    }
}
