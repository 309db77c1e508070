/// PgQ, as Debian packages it: one tick per batch, read batch by batch. Its tables are rotated later, which is not counted.
struct PgQQueue: Peer {
    let workload: Workload
    let batch: Int
    let name = "PgQ"
    let target = 1.5

    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws {
        try session.run(
            """
            SELECT pgq.create_queue('results'), pgq.register_consumer('results', 'ledger');
            SELECT pgq.set_queue_config('results', 'ticker_max_count', '1'), pgq.set_queue_config('results', 'ticker_max_lag', '0'),
                   pgq.set_queue_config('results', 'ticker_idle_period', '0');
            """)
        // Loaded as its own bulk_insert_events would: directly into the current event table.
        let table = try session.text("SELECT pgq.current_event_table('results')") ?? ""
        for first in stride(from: positions.lowerBound, to: positions.upperBound, by: batch) {
            let part = first..<min(first + batch, positions.upperBound)
            try session.run(
                """
                INSERT INTO \(table) (ev_time, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4)
                SELECT clock_timestamp(), r.status, r.body, r.environment, r.topic, r.token, r.sent_at
                FROM (\(workload.results(part, deadEvery: deadEvery))) AS r
                """)
            try session.run("SELECT pgq.ticker('results')")
        }
        try session.run("VACUUM (ANALYZE) \(table)")
    }

    func step(on session: Session) throws -> Int {
        var taken = 0
        // A tick without events is a batch as well.
        for _ in 0..<3 where taken == 0 {
            try session.run(Recording.begin)
            guard let number = try session.text("SELECT pgq.next_batch('results', 'ledger')") else {
                try session.run("COMMIT")
                return 0
            }
            taken = Int(
                try session.number(
                    Recording.statement(
                        from: "gone",
                        after: """
                            gone AS MATERIALIZED (
                                SELECT ev_extra1 AS environment, ev_extra2 AS topic, ev_extra3 AS token, ev_type AS status,
                                       ev_data AS body
                                FROM pgq.get_batch_events(\(number))
                            ),
                            """)))
            try session.run("SELECT pgq.finish_batch(\(number)); COMMIT")
        }
        return taken
    }
}
