/// A warning that takes too long to search for when `status` is read. `StatusCache` searches for it beforehand.
struct StatusWarning {
    /// Unique among the sources of `tokenkeeper.status_cache`. Warnings are shown in the order of these names.
    let name: String
    /// Returns one warning per row, the most important first. It may take a second; the first 20 rows are kept.
    let statement: String
    /// How long it must be found before it is shown.
    var patience: Duration = .zero

    static let all = [
        amended, doubtful, deadRows, erasures, mixedUp, notKeptRegistrations, notKept, published, restored, sequences,
        transactionIDs, unregistered, unknownTopics,
    ]

    /// An SQL condition on a row `s` of `pg_stat_user_tables`: it has more dead rows than twice what lets autovacuum begin. Not for the partitions of
    /// the queues, which are truncated.
    static let tooManyDeadRows = """
        s.schemaname = 'tokenkeeper' AND s.relname !~ '^(send_result|registration)_([0-7]|retry|backlog)$'
        AND s.n_dead_tup > 100000 + 2 * current_setting('autovacuum_vacuum_scale_factor')::float8 * s.n_live_tup
        """

    /// An SQL condition: ids of this age should have been frozen. PostgreSQL begins to freeze at the setting, and stops at about two billion.
    static func isOverdue(_ age: String, freezesAt setting: String) -> String {
        "\(age) > least(1.25 * \(setting)::float8, 1600000000)"
    }

    /// After a large batch, autovacuum needs some minutes.
    private static let deadRows = StatusWarning(
        name: "dead rows",
        statement: """
            SELECT format('tokenkeeper.%s has %s dead rows and %s live ones: autovacuum does not keep up',
                          s.relname, s.n_dead_tup, s.n_live_tup)
            FROM pg_catalog.pg_stat_user_tables AS s
            WHERE \(tooManyDeadRows)
            ORDER BY s.n_dead_tup DESC
            """, patience: .seconds(900))

    /// Those of topics and campaigns begin again at their end.
    private static let sequences = StatusWarning(
        name: "sequences",
        statement: """
            SELECT format('the sequence tokenkeeper.%s has given out %s of its %s numbers', s.sequencename, s.last_value, s.max_value)
            FROM pg_catalog.pg_sequences AS s
            WHERE s.schemaname = 'tokenkeeper' AND NOT s.cycle AND s.last_value > s.max_value * 0.8
            ORDER BY s.sequencename
            """)

    private static let transactionIDs = StatusWarning(
        name: "transaction ids",
        statement: """
            SELECT format('the oldest %s id of the database %s is %s transactions old, and PostgreSQL stops at 2,000,000,000: '
                          'autovacuum does not keep up, or something holds it back', a.kind, d.datname, a.age)
            FROM pg_catalog.pg_database AS d
            CROSS JOIN LATERAL (VALUES
                ('transaction', age(d.datfrozenxid), current_setting('autovacuum_freeze_max_age')),
                ('multixact', mxid_age(d.datminmxid), current_setting('autovacuum_multixact_freeze_max_age'))) AS a (kind, age, freezes_at)
            WHERE d.datname = current_database() AND \(isOverdue("a.age", freezesAt: "a.freezes_at"))
            """)

    private static let erasures = StatusWarning(
        name: "erasures",
        statement: """
            SELECT format('%s of forget cannot be finished, the oldest of %s UTC: a transaction from before is open, or a queue has rows from before',
                          CASE count(*) WHEN 1 THEN '1 erasure' ELSE count(*) || ' erasures' END,
                          to_char(min(e.forgotten_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'))
            FROM tokenkeeper.erasure AS e WHERE e.forgotten_at < now() - interval '1 hour' HAVING count(*) > 0
            """)

    /// Looks at the tokens of a topic that were suppressed last: at most 1000.
    private static let mixedUp = StatusWarning(
        name: "tokens of the other environment",
        statement: """
            SELECT format(CASE e.tokens WHEN 1 THEN '%s token of %s is suspect in %s, where it was registered'
                                        ELSE '%s tokens of %s are suspect in %s, where they were registered' END
                          || ', and active in the other environment: does the app report the right environment?',
                          e.tokens, t.topic, t.environment)
            FROM (SELECT c.topic_id FROM tokenkeeper.token_count AS c WHERE c.state = 'suspect' AND c.registered
                  GROUP BY 1 ORDER BY sum(c.tokens) DESC LIMIT 100) AS s
            JOIN tokenkeeper.topic AS t USING (topic_id)
            JOIN tokenkeeper.topic AS o ON o.topic = t.topic AND o.environment <> t.environment
            CROSS JOIN LATERAL (
                SELECT count(*) AS tokens
                FROM (SELECT n.topic_id, n.token_key FROM tokenkeeper.suppression AS n
                      WHERE n.topic_id + 0 = t.topic_id ORDER BY n.since DESC LIMIT 1000) AS n
                CROSS JOIN LATERAL (
                    SELECT FROM tokenkeeper.ledger AS l
                    WHERE l.topic_id = n.topic_id AND l.token_key = n.token_key AND l.registered_at > '-infinity'
                      AND tokenkeeper.state_of(l) = 'suspect' OFFSET 0) AS l
                CROSS JOIN LATERAL (
                    SELECT FROM tokenkeeper.ledger AS l
                    WHERE l.topic_id = o.topic_id AND l.token_key = n.token_key AND l.registered_at > '-infinity' AND NOT l.suppressed
                    OFFSET 0) AS k) AS e
            WHERE e.tokens > 0
            ORDER BY e.tokens DESC, t.topic, t.environment
            """)

    /// Whether a token of the topic `t` was registered.
    private static let hasRegistrations =
        "EXISTS (SELECT FROM tokenkeeper.token_count AS n WHERE n.topic_id = t.topic_id AND n.registered HAVING sum(n.tokens) > 0)"

    /// Looks at up to 10,000 tokens of a topic that has no recent registration, and usually at few. Uses now(), not clock_timestamp(), which an
    /// index cannot use.
    private static let unregistered = StatusWarning(
        name: "topics without registrations",
        statement: """
            SELECT format('%s (%s) had results within 24 hours, but no registration: does the app call tokenkeeper.register?',
                          c.topic, c.environment)
            FROM tokenkeeper.result_count AS c
            LEFT JOIN tokenkeeper.topic AS t ON t.topic = c.topic AND t.environment = c.environment
            WHERE c.hour > now() - interval '48 hours' AND c.environment IN ('production', 'sandbox') AND c.topic NOT IN ('', '(other)')
              AND NOT EXISTS (
                  -- In this order, it is a random sample.
                  SELECT FROM (SELECT l.registered_at FROM tokenkeeper.ledger AS l WHERE l.topic_id = t.topic_id
                               ORDER BY l.token_key LIMIT 10000) AS l
                  WHERE l.registered_at > now() - interval '24 hours')
              -- Otherwise it is an unknown topic.
              AND \(hasRegistrations)
            GROUP BY c.topic, c.environment
            -- Since yesterday, and still.
            HAVING max(c.hour) > now() - interval '24 hours'
               AND least(min(t.first_seen), min(c.hour)) < now() - interval '24 hours'
            ORDER BY c.topic, c.environment
            """)

    /// Topics with results or a policy that no app registers for. At once: a mistyped one has no other trace. One with a policy may be new, so only if
    /// it resembles another.
    private static let unknownTopics = StatusWarning(
        name: "unknown topics",
        statement: """
            SELECT CASE WHEN u.has_results
                       THEN format('%s (%s) has results, but no token of it was ever registered: %s', u.topic, u.environment,
                                   coalesce('is it ' || r.topic || '?', 'does the app call tokenkeeper.register?'))
                       ELSE format('%s (%s) has a policy, but no token of it was ever registered: is it %s?', u.topic, u.environment, r.topic) END
            FROM (SELECT k.topic, k.environment, bool_or(k.has_results) AS has_results
                  FROM (SELECT c.topic, c.environment, true AS has_results FROM tokenkeeper.result_count AS c
                        WHERE c.hour > now() - interval '24 hours' AND c.environment IN ('production', 'sandbox') AND c.topic NOT IN ('', '(other)')
                        UNION
                        SELECT t.topic, t.environment, false FROM tokenkeeper.topic AS t
                        WHERE num_nonnulls(t.gate, t.suppressed_retention, t.dormant_after, t.guard_allowance, t.guard_max_share, t.prune_allowance,
                                           t.prune_max_share, t.background_per_hour, t.max_per_second, t.alerts_per_day, t.confirm_share) > 0
                          AND t.moved_to IS NULL) AS k
                  LEFT JOIN tokenkeeper.topic AS t ON t.topic = k.topic AND t.environment = k.environment
                  WHERE NOT \(hasRegistrations)
                  GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT 20) AS u
            CROSS JOIN LATERAL (SELECT tokenkeeper.resembled_topic(u.topic, u.environment, is_registered => true) AS topic OFFSET 0) AS r
            WHERE u.has_results OR r.topic IS NOT NULL
            ORDER BY u.has_results DESC, u.topic, u.environment
            """)

    /// Has its own index, result_count_doubtful_410.
    private static let doubtful = StatusWarning(
        name: "410s that are not from APNs",
        statement: """
            SELECT format(CASE sum(c.results)
                              WHEN 1 THEN '%s 410 of %s (%s) within 24 hours is not from APNs, %s without a body, so its token is'
                              ELSE '%s 410s of %s (%s) within 24 hours are not from APNs, %s of them without a body, so their tokens are' END
                          || ' suspect and not stale: does a proxy answer, or does the sender omit the body?',
                          sum(c.results), c.topic, c.environment,
                          coalesce(sum(c.results) FILTER (WHERE c.reason = '410 without a body'), 0))
            FROM tokenkeeper.result_count AS c
            WHERE c.hour > now() - interval '24 hours' AND c.status = 410 AND c.reason LIKE '410 with%'
            GROUP BY c.topic, c.environment
            ORDER BY sum(c.results) DESC, c.topic, c.environment
            """)

    /// Has its own index, result_count_not_kept.
    private static let notKept = StatusWarning(
        name: "rejected results that were not kept",
        statement: """
            SELECT format('%s counted but not kept: more than drain.rejected_per_hour',
                          CASE sum(c.results) WHEN 1 THEN '1 rejected result of the last two hours was'
                                              ELSE sum(c.results) || ' rejected results of the last two hours were' END)
            FROM tokenkeeper.result_count AS c
            WHERE c.hour > now() - interval '2 hours' AND c.reason = '(rejected, not kept)'
            HAVING count(*) > 0
            """)

    private static let notKeptRegistrations = StatusWarning(
        name: "rejected registrations that were not kept",
        statement: """
            SELECT format('%s counted but not kept: more than drain.rejected_per_hour',
                          CASE sum(d.registrations) WHEN 1 THEN '1 rejected registration of the last two hours was'
                                                    ELSE sum(d.registrations) || ' rejected registrations of the last two hours were' END)
            FROM tokenkeeper.dropped_registration AS d
            WHERE d.hour > now() - interval '2 hours'
            HAVING count(*) > 0
            """)

    private static let amended = StatusWarning(
        name: "amended registrations",
        statement: """
            SELECT translate(format('%s of the last day%s without what could not be kept, such as: %s',
                CASE sum(a.registrations) WHEN 1 THEN '1 registration' ELSE sum(a.registrations) || ' registrations' END,
                coalesce(' from ' || s.kind || ' ' || s.name, ''), min(a.example)), '`', '''')
            FROM tokenkeeper.amended_registration AS a LEFT JOIN tokenkeeper.registration_source AS s USING (source_id)
            WHERE a.hour > now() - interval '1 day'
            GROUP BY s.kind, s.name ORDER BY sum(a.registrations) DESC
            """)

    private static let published = StatusWarning(
        name: "publications",
        statement: """
            SELECT format('publication %s includes the queue, and its subscribers cannot keep up with that: '
                          'see docs/how-to/back-up-and-restore.md', p.pubname)
            FROM pg_catalog.pg_publication_tables AS p
            WHERE p.schemaname = 'tokenkeeper' AND p.tablename ~ '^(send_re(sult|quest)|registration)(_[0-7]|_retry|_backlog)?$'
            GROUP BY p.pubname
            ORDER BY p.pubname
            """)

    private static let restored = StatusWarning(
        name: "a restored database",
        statement: """
            SELECT 'the database was restored: transaction ids of the history lie in the future until the next sweep'
            FROM tokenkeeper.sweep_progress AS s WHERE s.transaction_id >= pg_snapshot_xmax(pg_current_snapshot())
            """)
}
