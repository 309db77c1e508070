/// Token histories for programs. PostgreSQL builds the JSON from what was read and from the words of `Explanation`.
public enum HistoryJSON {
    /// One array on one line, with an object per token: environment, topic, token, device_id, user_id, state (null if the ledger does not know
    /// the token), sendable (what the gate answers), observed, registered_at, invalidated_at, reason, tags, moved_to (the
    /// database that has the topic now), verdict, revived_by, and history: an array of objects with at, event, text and the row's other columns. Instants are ISO 8601, in UTC.
    public static func array(
        of histories: [TokenHistory], on connection: inout Connection
    ) throws(DatabaseError) -> String {
        var numbers: [Int32?] = []
        for (index, history) in histories.enumerated() {
            numbers += [Int32?](repeating: Int32(index + 1), count: history.events.count)
        }
        let events = histories.flatMap(\.events)
        return try connection.query(
            """
            WITH history AS (
                SELECT e.of, json_agg(e.object ORDER BY e.place) AS events
                FROM (SELECT e.of, e.place, (
                          SELECT json_object_agg(f.key, f.value ORDER BY f.place) FROM (
                              SELECT r.key, r.value, CASE WHEN r.place <= 2 THEN r.place ELSE r.place + 1 END AS place
                              FROM json_each(e.json::json) WITH ORDINALITY AS r (key, value, place)
                              UNION ALL
                              SELECT 'text', to_json(e.words), 3) AS f) AS object
                      FROM unnest($1::int[], $2::text[], $3::text[]) WITH ORDINALITY AS e (of, json, words, place)) AS e
                GROUP BY e.of
            )
            SELECT coalesce(json_agg(json_build_object(
                'environment', h.json->'environment', 'topic', h.json->'topic', 'token', h.json->'token', 'device_id', h.device,
                'user_id', h.of_user, 'state', h.json->'state', 'sendable', h.json->'sendable', 'observed', h.json->'observed',
                'registered_at', h.json->'registered_at', 'invalidated_at', h.json->'invalidated_at', 'reason', h.json->'reason',
                'tags', h.json->'tags', 'moved_to', h.json->'moved_to', 'verdict', h.verdict,
                'revived_by', h.revival, 'history', coalesce(s.events, '[]'::json)) ORDER BY h.place), '[]')::text
            FROM (SELECT t.json::json AS json, t.device, t.verdict, t.revival, t.of_user, t.place
                  FROM unnest($4::text[], $5::text[], $6::text[], $7::text[], $8::text[])
                       WITH ORDINALITY AS t (json, device, verdict, revival, of_user, place)) AS h
            LEFT JOIN history AS s ON s.of = h.place
            """,
            [
                .int4s(numbers), .texts(events.map(\.json)), .texts(events.map(Explanation.event)),
                .texts(histories.map(\.json)), .texts(histories.map(\.deviceID)),
                .texts(histories.map(Explanation.verdict)),
                .texts(histories.map(Explanation.revival)), .texts(histories.map(\.userID)),
            ]
        ).value()
    }
}
