import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Reporting in one call` {
    static let at = 1_794_000_000_123

    /// How callers may write the status and the timestamp: literals, casts, and parameters of drivers that know their types and of
    /// drivers that do not.
    static let calls = [
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', \(at))",
        "SELECT tokenkeeper.report('t', 'aa', '410', 'Unregistered', \(at))",
        "SELECT tokenkeeper.report('t', 'aa', '410', 'Unregistered', '\(at)')",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', ' \(at) ')",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', '\(at).0')",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', '2026-11-06T21:20:00.123Z')",
        "SELECT tokenkeeper.report('t', 'aa', '410', 'Unregistered', timestamptz '2026-11-06T21:20:00.123Z')",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', timestamptz '2026-11-06T21:20:00.123Z')",
        "SELECT tokenkeeper.report('t', 'aa', 410::smallint, 'Unregistered', \(at), '2026-11-06T21:20:00Z')",
        "SELECT tokenkeeper.report('t', 'aa', 410::bigint, 'Unregistered', \(at), now(), 'an apns-id', 'production')",
        "SELECT tokenkeeper.report(topic => 't', token => 'aa', status => 410, reason => 'Unregistered', apns_timestamp => \(at), sent_at => now())",
        "PREPARE p AS SELECT tokenkeeper.report($1, $2, $3, $4, $5, $6); EXECUTE p('t', 'aa', '410', 'Unregistered', '\(at)', NULL)",
        """
        PREPARE p (text, text, integer, text, bigint, timestamptz) AS SELECT tokenkeeper.report($1, $2, $3, $4, $5, $6);
        EXECUTE p('t', 'aa', 410, 'Unregistered', \(at), NULL)
        """,
        // As Python's float, and other types of numbers and instants.
        "SELECT tokenkeeper.report('t', 'aa', 410::numeric, 'Unregistered', \(at)::double precision)",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', \(at).9::numeric)",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', '1.794000000123e12')",
        "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', timestamp '2026-11-06 21:20:00.123')",
        #"SELECT tokenkeeper.report('t', 'aa', 410, body => '{"reason":"Unregistered","timestamp":\#(at)}')"#,
        """
        PREPARE p (text, text, integer, text, double precision) AS SELECT tokenkeeper.report($1, $2, $3, $4, $5);
        EXECUTE p('t', 'aa', 410, 'Unregistered', \(at))
        """,
        """
        PREPARE p (varchar, varchar, varchar, varchar, varchar, timestamp) AS SELECT tokenkeeper.report($1, $2, $3, $4, $5, $6);
        EXECUTE p('t', 'aa', '410', 'Unregistered', '\(at)', NULL)
        """,
    ]

    @Test(arguments: calls)
    func `a 410 makes its token stale as of the timestamp, however it is written`(call: String) throws {
        let database = try TestCluster.shared.database()
        try database.psql(call, user: "a_sender")
        #expect(
            try database.psql("SELECT status, body FROM tokenkeeper.send_result")
                == #"410|{"reason":"Unregistered","timestamp":1794000000123}"#)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT state, reason, invalidated_at AT TIME ZONE 'UTC' FROM tokenkeeper.token")
                == "stale|Unregistered|2026-11-06 21:20:00.123")
    }

    @Test func `without a timestamp, the reason alone decides`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', sent_at => now()), tokenkeeper.report('t', 'bb', '400', 'BadDeviceToken', NULL, now()),
                   tokenkeeper.report('t', 'cc', 400, 'BadTopic'), tokenkeeper.report('t', 'dd', 200), tokenkeeper.report('t', 'ee', '200', '', '');
            """, user: "a_sender")
        #expect(
            try database.psql("SELECT string_agg(coalesce(body, '-'), ' ' ORDER BY token) FROM tokenkeeper.send_result")
                == #"{"reason":"Unregistered"} {"reason":"BadDeviceToken"} {"reason":"BadTopic"} - -"#)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.rejected == 0)
        #expect(
            try database.psql(
                "SELECT string_agg(token || ' ' || state || ' ' || reason, ', ' ORDER BY token) FROM tokenkeeper.token")
                == "aa suspect 410 without a timestamp, bb suspect BadDeviceToken")
    }

    @Test func `what cannot be understood raises no error, and is rejected complete`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.report('t', 'zz', 410, 'Unregistered', \(Self.at)), tokenkeeper.report(NULL, 'bb', 400),
                   tokenkeeper.report('t', 'cc', 'failed', 'it''s "down"', NULL, '2026-11-06Z', 'id'),
                   tokenkeeper.report('t', 'dd', 410, 'Unregistered', 1794000000), tokenkeeper.report('t', 'ee', 410, 'Unregistered', 'infinity'),
                   tokenkeeper.report('t', 'ff', 410, 'Unregistered', 'infinity'::timestamptz), tokenkeeper.report(NULL, NULL, NULL),
                   tokenkeeper.report('t', 'ab', 410, 'Unregistered', 9223372036854775807), tokenkeeper.report('t', 'ac', 400, sent_at => 'infinity'),
                   tokenkeeper.report('t', 'ad', 410, 'Unregistered', -1), tokenkeeper.report('t', 'ae', 410, 'Unregistered', repeat('9', 30))
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).rejected == 11)
        #expect(
            try database.psql(
                "SELECT status, body, apns_id, sent_at AT TIME ZONE 'UTC' FROM tokenkeeper.rejected_result WHERE token = 'cc'"
            )
                == #"failed|{"reason":"it's \"down\""}|id|2026-11-06 00:00:00"#)
    }

    @Test func `a 410 with a timestamp that is none makes its token suspect, and keeps what was reported`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', 'some day', '2026-11-06Z')", user: "a_sender")
        #expect(
            try database.psql("SELECT body FROM tokenkeeper.send_result")
                == #"{"reason":"Unregistered","timestamp":"some day"}"#)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT state, reason FROM tokenkeeper.token") == "suspect|410 without a timestamp")
    }

    @Test func `an instant without a time zone is in UTC, whatever the session says`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SET timezone = 'America/New_York';
            SET datestyle = 'SQL, DMY';
            SELECT tokenkeeper.report('t', 'aa', 410, 'Unregistered', '2026-11-06 21:20:00.123')
            """, user: "a_sender")
        #expect(
            try database.psql("SELECT body FROM tokenkeeper.send_result")
                == #"{"reason":"Unregistered","timestamp":1794000000123}"#)
    }
}
