extension ExtremesMeasurement {
    /// Registrations with a device_id that thousands of tokens share, by an application's mistake.
    func crowdedDevice(_ database: Database) throws {
        let session = try database.session()
        let tokens = 4700
        try session.run(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'crowd');
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, device_at)
            SELECT 1, sha256(i::text::bytea), t.at, 'constant', t.at
            FROM generate_series(1, \(tokens)) AS i, LATERAL (SELECT now() - interval '2 days' + i * interval '1 second' AS at) AS t
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger")
        let client = try PreparedClient(database)
        try client.prepare(
            "register",
            "SELECT tokenkeeper.register(encode(sha256($1::text::bytea), 'hex'), 'crowd', device_id => 'constant')")
        let before = try session.number("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
        let start = ContinuousClock.now
        let calls = 200
        // Half of them new tokens.
        for i in 1...calls { try client.call("register", ["\(i * 47)"]) }
        let each = start.duration(to: .now) / .milliseconds(1) / Double(calls)
        let wal = try session.number("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')") - before
        report.compare(
            "a registration of a device with \(tokens) tokens", Spread([each]), atMost: 10, digits: 2, unit: " ms")
        report.compare("its WAL", Spread([wal / Double(calls) / 1000]), atMost: 50, digits: 1, unit: " kB")
    }
}
