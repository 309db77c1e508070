extension ExtremesMeasurement {
    /// One batch with suspects of hundreds of topics, and 410s of new tokens.
    func manyTopics(_ database: Database) throws {
        let session = try database.session()
        try session.run(
            "INSERT INTO tokenkeeper.topic (environment, topic) SELECT 'production', 't' || n FROM generate_series(1, 800) AS n"
        )
        let daemons = try MeasuredDaemon.start(on: database)
        defer { for daemon in daemons { daemon.stop() } }
        try session.run(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't' || n, encode(sha256((n || '/' || i)::bytea), 'hex'), 400, '\(Self.badToken)' FROM generate_series(1, 800) AS n, generate_series(1, 3) AS i
            UNION ALL
            SELECT 't' || n, encode(sha256(n::text::bytea), 'hex'), 410,
                   format('{"reason":"Unregistered","timestamp":%s}', (extract(epoch FROM now()) * 1000)::bigint) FROM generate_series(1, 800, 8) AS n
            """)
        report(
            "2,400 suspects and 100 fresh 410s of 800 topics, until none is queued", try untilQueueIsEmpty(session),
            target: 5)
    }
}
