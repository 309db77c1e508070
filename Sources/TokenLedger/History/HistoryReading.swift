/// Reads the events and newer tokens of the tokens that were found.
enum HistoryReading {
    /// Completes the tokens with their events and newer tokens, in the transaction of the search.
    static func complete(
        _ found: [TokenHistory], on connection: inout Connection
    ) throws(DatabaseError) -> [TokenHistory] {
        var histories = found
        for index in histories.indices where histories[index].isSuppressed && histories[index].deviceID != nil {
            histories[index].newer = try newer(than: histories[index], on: &connection)
        }
        try readEvents(into: &histories, on: &connection)
        return histories
    }

    /// The latest of the device's other tokens.
    private static func newer(
        than history: TokenHistory, on connection: inout Connection
    ) throws(DatabaseError) -> TokenHistory.NewerToken? {
        try connection.query(
            """
            SELECT left(v.token, \(TokenDigits.shown)), \(HistoryMoment.sql("v.registered_at"))
            FROM tokenkeeper.token AS v
            WHERE v.topic = $1 AND v.environment = $2 AND v.device_id = $3 AND v.token_key <> decode($4, 'hex')
              AND v.registered_at IS NOT NULL
              AND tokenkeeper.has_one_token_per_device($1)
            ORDER BY v.registered_at DESC, v.token_key DESC LIMIT 1
            """,
            [.text(history.topic), .text(history.environment), .text(history.deviceID), .text(history.token)]
        ).first { row throws(DatabaseError) in
            TokenHistory.NewerToken(digits: try row.read(), registeredAt: try row.read())
        }
    }

    /// Events of the topic are included from the token's first event on; to its last, if the ledger does not know the token any more.
    private static let events = """
        WITH asked AS (
            SELECT a.number, a.environment, a.topic, a.token, decode(a.token, 'hex') AS token_key, a.known
            FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
                 WITH ORDINALITY AS a (environment, topic, token, known, number)
        ), own AS MATERIALIZED (
            SELECT a.number, e.at, 'history' AS source, e.event_id AS id, e.event, e.cause, e.reason, e.device_id,
                   NULL::text AS message, NULL::text AS done_by, NULL::bigint AS rows,
                   e.registered_before, e.registered_after, e.invalidated_before, e.invalidated_after,
                   NULL::timestamptz AS since, NULL::timestamptz AS until,
                   json_build_object('at', e.at, 'event', e.event, 'event_id', e.event_id, 'cause', e.cause, 'reason', e.reason,
                       'device_id', e.device_id, 'user_id', e.user_id, 'registered_before', e.registered_before, 'registered_after', e.registered_after,
                       'invalidated_before', e.invalidated_before, 'invalidated_after', e.invalidated_after) AS json
            FROM asked AS a
            CROSS JOIN LATERAL (
                SELECT v.* FROM tokenkeeper.token_event AS v
                WHERE v.token_key = a.token_key AND v.topic = a.topic AND v.environment = a.environment
                ORDER BY v.at DESC, v.event_id DESC LIMIT \(TokenHistory.mostEvents)) AS e
            UNION ALL
            SELECT a.number, h.held_at, 'held', h.held_id, 'held', h.cause, h.reason, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                   h.invalidated_at, NULL,
                   json_build_object('at', h.held_at, 'event', 'held', 'held_id', h.held_id, 'reason', h.reason,
                       'invalidated_at', h.invalidated_at, 'status', h.status, 'apns_id', h.apns_id, 'sent_at', h.sent_at,
                       'queued_at', h.queued_at)
            FROM asked AS a
            JOIN tokenkeeper.topic AS o ON o.topic = a.topic AND o.environment = a.environment
            CROSS JOIN LATERAL (
                SELECT w.* FROM tokenkeeper.held_result AS w
                WHERE w.topic_id = o.topic_id AND w.token_key = a.token_key
                  AND w.topic = a.topic AND coalesce(w.environment, 'production') = a.environment
                ORDER BY w.held_id DESC LIMIT 20) AS h
            UNION ALL
            SELECT a.number, h.held_at, 'held', h.held_id, 'held', 'unregistered_by_app', NULL, h.device_id, NULL, NULL, NULL,
                   NULL, NULL, NULL, NULL, h.invalidated_at, NULL,
                   json_build_object('at', h.held_at, 'event', 'held', 'held_id', h.held_id, 'cause', 'unregistered_by_app',
                       'invalidated_at', h.invalidated_at, 'source_id', h.source_id, 'queued_at', h.queued_at)
            FROM asked AS a
            JOIN tokenkeeper.topic AS o ON o.topic = a.topic AND o.environment = a.environment
            CROSS JOIN LATERAL (
                SELECT w.* FROM tokenkeeper.held_registration AS w
                WHERE w.topic_id = o.topic_id AND w.token_key = a.token_key
                  AND w.topic = a.topic AND coalesce(w.environment, 'production') = a.environment
                ORDER BY w.held_id DESC LIMIT 20) AS h
            UNION ALL
            SELECT r.number, r.rejected_at, 'rejected', r.rejected_id, 'rejected', NULL, NULL, NULL, r.error, NULL, NULL,
                   NULL, NULL, NULL, NULL, NULL, NULL,
                   json_build_object('at', r.rejected_at, 'event', 'rejected', 'rejected_id', r.rejected_id, 'error', r.error,
                       'environment', r.said_environment, 'topic', r.said_topic, 'status', r.status, 'apns_id', r.apns_id,
                       'sent_at', r.sent_at, 'queued_at', r.queued_at)
            -- A result of another topic does not concern this token; but the topic or the environment may be what is wrong with it.
            FROM (SELECT w.rejected_id, w.rejected_at, w.error, w.environment AS said_environment, w.topic AS said_topic, w.status,
                         w.apns_id, w.sent_at, w.queued_at, a.number,
                         row_number() OVER (PARTITION BY a.number ORDER BY w.rejected_id DESC) AS place
                  FROM tokenkeeper.rejected_result AS w
                  JOIN asked AS a ON a.token = lower(w.token)
                  WHERE coalesce(w.topic, '') IN ('', a.topic)
                    AND (coalesce(w.environment, 'production') = a.environment OR w.environment NOT IN ('production', 'sandbox'))) AS r
            WHERE r.place <= 20
        ), span AS (
            SELECT a.number, a.environment, a.topic, coalesce(min(o.at), '-infinity') AS first,
                   CASE WHEN a.known = 'true' OR bool_or(o.source = 'held') THEN 'infinity' ELSE max(o.at) END AS last
            FROM asked AS a LEFT JOIN own AS o USING (number)
            GROUP BY a.number, a.environment, a.topic, a.known
        ), of_topic AS (
            SELECT s.number, d.at, 'operation' AS source, d.operation_id AS id, d.operation AS event, NULL::text AS cause,
                   NULL::text AS reason, NULL::text AS device_id, d.message, d.done_by, d.rows,
                   NULL::timestamptz AS registered_before, NULL::timestamptz AS registered_after,
                   NULL::timestamptz AS invalidated_before, NULL::timestamptz AS invalidated_after,
                   NULL::timestamptz AS since, NULL::timestamptz AS until,
                   json_build_object('at', d.at, 'event', d.operation, 'of_topic', true, 'operation_id', d.operation_id,
                       'message', d.message, 'rows', d.rows, 'done_by', d.done_by) AS json
            FROM span AS s
            CROSS JOIN LATERAL (
                -- reinstated is not listed: its window is.
                SELECT p.* FROM tokenkeeper.operation AS p
                WHERE p.topic = s.topic AND p.environment = s.environment AND p.at BETWEEN s.first AND s.last
                  AND p.operation IN ('guard_tripped', 'guard_reset', 'held_released', 'held_discarded', 'policy_changed')
                ORDER BY p.operation_id DESC LIMIT 50) AS d
            UNION ALL
            SELECT s.number, w.at, 'reinstatement', w.exclusion_id, 'reinstatement', w.cause, NULL, NULL, NULL, w.done_by, NULL,
                   NULL, NULL, NULL, NULL, w.since, w.until,
                   json_build_object('at', w.at, 'event', 'reinstatement', 'of_topic', true, 'cause', w.cause, 'since', w.since, 'until', w.until,
                       'done_by', w.done_by)
            FROM span AS s
            CROSS JOIN LATERAL (
                SELECT r.* FROM tokenkeeper.reinstatement AS r
                WHERE r.topic = s.topic AND r.environment = s.environment AND r.at <= s.last
                  AND (r.at >= s.first OR r.until >= s.first)
                ORDER BY r.exclusion_id DESC LIMIT 50) AS w
        )
        SELECT e.number, \(HistoryMoment.sql("e.at")), e.source, e.event, e.cause, e.reason, e.device_id, e.message, e.done_by, e.rows,
               \(HistoryMoment.sql("e.registered_before")), \(HistoryMoment.sql("e.registered_after")),
               \(HistoryMoment.sql("e.invalidated_before")), \(HistoryMoment.sql("e.invalidated_after")),
               \(HistoryMoment.sql("e.since")), \(HistoryMoment.sql("e.until")), e.json::text, e.json ->> 'user_id'
        FROM (SELECT * FROM own UNION ALL SELECT * FROM of_topic) AS e
        ORDER BY e.number, e.at, e.source, e.id
        """

    private static func readEvents(
        into histories: inout [TokenHistory], on connection: inout Connection
    ) throws(DatabaseError) {
        let found = try connection.query(
            events,
            [
                .texts(histories.map(\.environment)), .texts(histories.map(\.topic)), .texts(histories.map(\.token)),
                .texts(histories.map { $0.state == nil ? "false" : "true" }),
            ]
        ).decode { row throws(DatabaseError) in (number: try row.read(Int.self), event: try HistoryEvent(from: &row)) }
        for (number, event) in found {
            let index = number - 1
            histories[index].events.append(event)
            // The latest device and user in the history are the last ones that are known of a token that the ledger has forgotten.
            if histories[index].state == nil, event.source == .history {
                histories[index].deviceID = event.deviceID ?? histories[index].deviceID
                histories[index].userID = event.userID ?? histories[index].userID
            }
        }
    }
}

extension HistoryEvent {
    /// Reads the columns of `HistoryReading.events` that follow the number.
    fileprivate init(from row: inout Row) throws(DatabaseError) {
        self.init(at: try row.read(), source: try row.read(), event: try row.read())
        cause = try row.read()
        reason = try row.read()
        deviceID = try row.read()
        message = try row.read()
        doneBy = try row.read()
        rows = try row.read()
        registeredBefore = try row.read()
        registeredAfter = try row.read()
        invalidatedBefore = try row.read()
        invalidatedAfter = try row.read()
        since = try row.read()
        until = try row.read()
        json = try row.read()
        userID = try row.read()
    }
}
