import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What a login with `tokenkeeper_monitor` can read: counts, times and topics.
@Suite(.ownThread) struct `The monitoring role` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// The columns of tables and views that it can read.
    private static let readable = """
        SELECT c.oid, c.relname, a.attname, a.atttypid FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
        WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
          AND a.attnum > 0 AND NOT a.attisdropped
          AND has_column_privilege('a_monitor', c.oid, a.attnum, 'SELECT')
        """

    /// A new column that monitoring may read has to be a number or a time, or to be named here. Those are words of ours, or names of topics and databases.
    @Test func `it reads numbers, times and the names of topics, and no other text`() throws {
        let texts = try database.psql(
            """
            SELECT DISTINCT attname FROM (\(Self.readable)) AS r
            WHERE atttypid NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype, 'bool'::regtype,
                                   'timestamptz'::regtype, 'interval'::regtype) ORDER BY 1
            """)
        #expect(
            texts.split(separator: "\n") == [
                "cause", "credentials", "daemon_id", "environment", "moved_to", "outcome", "period", "reason", "state",
                "topic",
                "trigger", "version",
            ])
    }

    @Test func `it changes nothing, and calls no function but one that a view needs`() throws {
        let functions = try database.psql(
            """
            SELECT p.oid::regprocedure FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND has_function_privilege('a_monitor', p.oid, 'EXECUTE') ORDER BY p.proname
            """)
        // The views of campaigns call them with the rights of their reader.
        #expect(functions == "tokenkeeper.caller()\ntokenkeeper.sending_fault(text,text)")
        let changes = try database.psql(
            """
            SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND CASE c.relkind
                WHEN 'S' THEN has_sequence_privilege('a_monitor', c.oid, 'USAGE, SELECT, UPDATE')
                WHEN 'i' THEN false WHEN 'I' THEN false
                ELSE has_table_privilege('a_monitor', c.oid, 'DELETE, TRUNCATE, TRIGGER')
                     OR has_any_column_privilege('a_monitor', c.oid, 'INSERT, UPDATE, REFERENCES') END
            """)
        #expect(changes == "")
    }

    @Test func `it meets no token, device or payload, wherever they are`() throws {
        let token = "feedface"
        try database.psql(
            """
            SELECT tokenkeeper.register('\(token)' || lpad(to_hex(i), 4, '0'), 't', device_id => 'secret-device', tags => '{secret-tag}')
            FROM generate_series(1, 60) AS i;
            INSERT INTO tokenkeeper.send_request (topic, token, payload, collapse_id)
            VALUES ('t', '\(token)', '{"aps":{"alert":"secret"}}', 'secret');
            INSERT INTO tokenkeeper.failed_send (error, topic, token, payload, request_id, queued_at, attempts)
            VALUES ('secret', 't', '\(token)', '{"secret":1}', 1, now(), 1);
            INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, push_type, request_id, queued_at)
            VALUES ('production', 't', '\(token)', '\\xfeedface', 'stale', 'alert', 1, now());
            INSERT INTO tokenkeeper.sweep_run (trigger, outcome, started_at, finished_at, message)
            VALUES ('sql', 'failed', now(), now(), 'secret');
            INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused, samples)
            VALUES (1, 'production', 't', 'stale', 9, true, '{\(token)}');
            SELECT tokenkeeper.pause_sending('t', reason => 'secret');
            INSERT INTO tokenkeeper.daemon (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact, problem, waiting_for)
            VALUES ('d', '1', now(), now(), 0, true, 'secret', 'secret');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', '\(token)0001', 410, \(goneBody)), ('t', '\(token)0002', 400, '{"reason":"BadDeviceToken"}'), ('t', '\(token) ?', 410, 'secret');
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', '\(token)0003', 410)")
        #expect(try database.psql("SELECT warnings FROM tokenkeeper.status").contains("secret-device"))

        let columns = try database.psql(
            "SELECT relname, string_agg(quote_ident(attname), ', ') FROM (\(Self.readable)) AS r GROUP BY 1 ORDER BY 1")
        var read = 0
        for line in columns.split(separator: "\n") {
            let parts = line.split(separator: "|")
            let seen = try database.psql("SELECT \(parts[1]) FROM tokenkeeper.\(parts[0])", user: "a_monitor")
            #expect(!seen.contains(token), "\(parts[0]): \(seen)")
            #expect(!seen.contains("secret"), "\(parts[0]): \(seen)")
            if !seen.isEmpty { read += 1 }
        }
        #expect(read >= 8, "what is empty proves nothing: \(columns)")
    }
}
