import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// An expression of the owner that does not end: the generated functions run into `statement_timeout`.
@Suite(.ownThread) struct `An attached table that does not answer` {
    private func devices() throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try isOut("RETURN $1 IS NOT NULL", devices)
        try devices.attach(
            arguments: """
                token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen', unregistered => 'app.is_out(logged_out_at)'
                """)
        try devices.app("INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now()), ('bbbb', now())")
        try devices.drain()
        return devices
    }

    private func isOut(_ body: String, _ devices: AttachedDevices) throws {
        try devices.app(
            """
            CREATE OR REPLACE FUNCTION app.is_out(timestamptz) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
            BEGIN
                \(body);
            END
            $$
            """)
    }

    private static let never = "PERFORM pg_sleep(600); RETURN true"

    /// Applies what is queued, as the daemon does, and returns the tokens that still wait.
    private func drain(_ devices: AttachedDevices, timeout: String = "0") throws -> String {
        var daemon = try devices.database.connect()
        try daemon.execute("SET statement_timeout = '\(timeout)'")
        try daemon.execute(
            """
            WITH gone AS (DELETE FROM tokenkeeper.registration RETURNING *)
            SELECT FROM tokenkeeper.apply_registrations((SELECT array_agg(g::tokenkeeper.registration) FROM gone AS g), 1000000, 0.5, 1000)
            """)
        return try devices.queued().joined(separator: ", ")
    }

    private func faults(_ devices: AttachedDevices) throws -> String {
        try devices.database.psql("SELECT FROM tokenkeeper.check_attachments()", user: "a_daemon")
        return try devices.database.psql("SELECT fault FROM tokenkeeper.attachment", user: "a_reader")
    }

    @Test func `its logouts wait twice, then it shows as broken and is asked once an hour`() throws {
        let devices = try devices()
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id = 1")
        try isOut(Self.never, devices)
        #expect(try drain(devices, timeout: "2s") == "aaaa out")
        #expect(try faults(devices) == "")
        #expect(try drain(devices, timeout: "2s") == "aaaa out")
        #expect(try faults(devices) == "")
        #expect(try drain(devices, timeout: "2s") == "")
        #expect(try devices.states() == "aaaa active, bbbb active")
        let broken =
            "looking its tokens up takes longer than statement_timeout, so no logout counts; it is tried once an hour"
        #expect(try faults(devices) == broken)
        #expect(
            try devices.database.psql("SELECT s::text LIKE '%\(broken)%' FROM tokenkeeper.status_detail AS s") == "t")

        // Within the hour it is not asked, even if it would answer.
        try isOut("RETURN $1 IS NOT NULL", devices)
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id = 2")
        #expect(try drain(devices) == "")
        #expect(try devices.states() == "aaaa active, bbbb active")
        #expect(try faults(devices) == broken)

        try devices.database.psql(
            "UPDATE tokenkeeper.attachment_timeout SET last_at = last_at - interval '1 hour'", user: "postgres")
        try devices.app("UPDATE app.devices SET logged_out_at = NULL, last_seen = now() WHERE id = 2")
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id = 2")
        #expect(try drain(devices) == "")
        #expect(try devices.states() == "aaaa active, bbbb unregistered_by_app")
        #expect(try faults(devices) == "")
        // The logout that did not count.
        #expect(try devices.differences() == "logged_out 1")
    }

    @Test func `a statement that somebody cancels is no timeout`() throws {
        let devices = try devices()
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id = 1")
        try isOut("RAISE query_canceled", devices)
        let error = #expect(throws: DatabaseError.self) { _ = try drain(devices) }
        #expect(error?.sqlState == "57014")
        #expect(try devices.database.psql("SELECT count(*) FROM tokenkeeper.attachment_timeout") == "0")
    }

    @Test func `a comparison that ran into a timeout is due later each time, and shows as broken`() throws {
        let devices = try devices()
        var daemon = try devices.database.connect(user: "a_daemon")
        let table = "app.devices"
        func due() throws -> [String] { try Comparison.due(every: .seconds(0), on: &daemon) }
        func passes(_ hours: Int) throws {
            try devices.database.psql(
                "UPDATE tokenkeeper.attachment_timeout SET last_at = clock_timestamp() - interval '\(hours) hours 1 minute'",
                user: "postgres")
        }
        #expect(try due() == [table])
        for hours in [1, 2, 4, 8, 16, 24, 24] {
            let comparison = try Comparison(of: table, isRepaired: false, on: &daemon)
            try comparison.noteTimeout(on: &daemon)
            try passes(hours - 1)
            #expect(try due() == [])
            try passes(hours)
            #expect(try due() == [table])
        }
        #expect(
            try faults(devices)
                == "comparing its rows takes longer than statement_timeout; daemons try that more rarely")
        #expect(try devices.differences() == "")
        #expect(try faults(devices) == "")
    }
}
