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
                                jsonb_to_record(d.message) AS m (environment text, topic text, token text, status text, body text)
                        ),
                        """) + "; COMMIT")
        return Int(taken)
    }
}
