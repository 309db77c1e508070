/// A table with an index on the id, whose rows are claimed with SKIP LOCKED, as in most job queues. Claim and deletion are one
/// statement.
struct SkipLockedQueue: Peer {
    let workload: Workload
    let batch: Int
    let name = "SKIP LOCKED queue"
    let target = 4.0

    func prepare(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws {
        try session.run(
            """
            CREATE TABLE queue (id bigserial PRIMARY KEY, environment text, topic text, token text, status text, body text,
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
