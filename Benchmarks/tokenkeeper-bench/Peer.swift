/// Another kind of queue on the same work, which ends in the same ledger: by the floor's own statement on the server, so a
/// peer has no client work at all.
protocol Peer {
    init(workload: Workload, batch: Int)
    var name: String { get }
    var batch: Int { get }
    /// How many times as fast the daemon shall be.
    var target: Double { get }
    var workload: Workload { get }

    /// Makes the queue and fills it.
    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws
    /// Drains one batch.
    ///
    /// - Returns: How many results that were.
    func step(on session: Session) throws -> Int
}

extension Peer {
    func drain(_ positions: Range<Int>, deadEvery: Int, on database: Database) throws -> Sample {
        try prepare(positions, deadEvery: deadEvery, on: database.session())
        let session = try database.session()
        try session.run("CHECKPOINT")
        let stopwatch = try Stopwatch(database.cluster)
        var left = positions.count
        while left > 0 {
            let taken = try step(on: session)
            guard taken > 0 else { break }
            left -= taken
        }
        return try stopwatch.sample(rows: positions.count)
    }
}

/// An id-indexed table claimed by rows: the statement of most job queues, with the claim and the deletion already in one.
struct SkipLockedQueue: Peer {
    let workload: Workload
    let batch: Int
    let name = "SKIP LOCKED queue"
    let target = 4.0

    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws {
        try session.run(
            """
            CREATE TABLE queue (id bigserial PRIMARY KEY, environment text, topic text, token text, status integer, body text,
                                sent_at timestamptz, queued_at timestamptz NOT NULL DEFAULT clock_timestamp());
            INSERT INTO queue (environment, topic, token, status, body, sent_at) \(workload.results(positions, deadEvery: deadEvery));
            """)
        try session.run("VACUUM (ANALYZE) queue")
    }

    func step(on session: Session) throws -> Int {
        let taken = try session.number(
            Recording.begin
                + Recording.statement(
                    from: "gone",
                    after: """
                        batch AS (
                            SELECT id FROM queue ORDER BY id LIMIT \(batch) FOR UPDATE SKIP LOCKED
                        ), gone AS (
                            DELETE FROM queue AS q USING batch AS b WHERE q.id = b.id
                            RETURNING q.environment, q.topic, q.token, q.status, q.body
                        ),
                        """) + "; COMMIT")
        return Int(taken)
    }
}

/// The cycle of pgmq written out as SQL, an emulation: read (a visibility timeout on each message), record, delete by id.
struct PgmqCycle: Peer {
    let workload: Workload
    let batch: Int
    let name = "pgmq's cycle (emulated)"
    let target = 4.0

    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws {
        try session.run(
            """
            CREATE TABLE queue (msg_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, read_ct integer NOT NULL DEFAULT 0,
                                enqueued_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb);
            CREATE INDEX queue_vt ON queue (vt);
            INSERT INTO queue (vt, message)
            SELECT clock_timestamp(), to_jsonb(r) FROM (\(workload.results(positions, deadEvery: deadEvery))) AS r;
            """)
        try session.run("VACUUM (ANALYZE) queue")
    }

    func step(on session: Session) throws -> Int {
        let ids = try session.text(
            Recording.begin + """
                WITH batch AS (
                    SELECT msg_id FROM queue WHERE vt <= clock_timestamp() ORDER BY msg_id LIMIT \(batch) FOR UPDATE SKIP LOCKED
                ), read AS (
                    UPDATE queue AS q SET vt = clock_timestamp() + interval '300 s', read_ct = read_ct + 1
                    FROM batch AS b WHERE q.msg_id = b.msg_id RETURNING q.msg_id, q.message
                )
                SELECT array_agg(msg_id) FROM read; COMMIT
                """)
        guard let ids else { return 0 }
        let taken = try session.number(
            Recording.begin
                + Recording.statement(
                    from: "gone",
                    after: """
                        deleted AS (
                            DELETE FROM queue WHERE msg_id = ANY ('\(ids)'::bigint[]) RETURNING message
                        ), gone AS (
                            SELECT m.* FROM deleted AS d CROSS JOIN LATERAL
                                jsonb_to_record(d.message) AS m (environment text, topic text, token text, status integer, body text)
                        ),
                        """) + "; COMMIT")
        return Int(taken)
    }
}

/// PgQ, as Debian packages it: a tick each batch, read by the batch; its tables are rotated later, which is not charged.
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
        // Loaded as its own bulk_insert_events would: straight into the event table of the moment.
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
                                SELECT ev_extra1 AS environment, ev_extra2 AS topic, ev_extra3 AS token, ev_type::integer AS status,
                                       ev_data AS body
                                FROM pgq.get_batch_events(\(number))
                            ),
                            """)))
            try session.run("SELECT pgq.finish_batch(\(number)); COMMIT")
        }
        return taken
    }
}
