extension ExtremesMeasurement {
    /// `forget` with thousands of large rejected results, and how long it stops the drains.
    func erasure(_ database: Database) throws {
        let session = try database.session()
        let rows = size(3900)
        // 100 kB each, barely compressible.
        try session.run(
            """
            INSERT INTO tokenkeeper.rejected_result (error, topic, token, status, body, queued_at)
            SELECT 'no token', 't', 'xyz' || i, 410, b.body, now() FROM generate_series(1, \(rows)) AS i
            CROSS JOIN LATERAL (SELECT string_agg(encode(sha256((i || '/' || n)::bytea), 'base64'), '') AS body FROM generate_series(1, 2300) AS n) AS b
            """)
        let start = ContinuousClock.now
        try session.run("SELECT tokenkeeper.forget(repeat('ab', 32))")
        report.compare(
            "forget, with \(rows) rejected results of 100 kB", Spread([start.duration(to: .now) / .seconds(1)]),
            atMost: 10,
            digits: 2, unit: " s")
    }
}
