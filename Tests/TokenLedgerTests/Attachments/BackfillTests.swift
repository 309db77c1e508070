import APNsFeedback
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Backfills` {
    /// A table with rows, which is then attached.
    private func devices(_ rows: Int) throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) SELECT lpad(to_hex(i), 4, '0'), now() - interval '1 day' FROM generate_series(1, \(rows)) AS i"
        )
        try devices.attach()
        return devices
    }

    private func begin(_ devices: AttachedDevices) throws -> String {
        try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
    }

    @Test func `two sessions that continue one backfill queue each row once`() throws {
        let devices = try devices(40)
        let source = try begin(devices)
        let next = "SELECT queued, finished FROM tokenkeeper.backfill_next(\(source), 15)"
        var first = try devices.database.connect(user: "a_app")
        try first.execute("BEGIN")
        #expect(try first.lines(next, columns: 2) == ["15|f"])
        let (failures, done) = (Failures(), DispatchGroup())
        done.enter()
        Thread.detachNewThread {
            do {
                let said = try devices.app(next)
                if said != "15|f" { failures.add(said) }
            } catch { failures.add("\(error)") }
            done.leave()
        }
        try eventually("the other session waits") {
            try devices.database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                user: "postgres") == "1"
        }
        try first.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
        #expect(try devices.app(next) == "10|t")
        #expect(
            try devices.database.psql("SELECT count(*), count(DISTINCT token) FROM tokenkeeper.registration") == "40|40"
        )
    }

    @Test func `a table that was attached again is backfilled from the beginning`() throws {
        let devices = try devices(40)
        let before = try begin(devices)
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(before), 15)")
        let again = "SELECT source_id, done, resumes FROM tokenkeeper.begin_backfill('app.devices')"
        #expect(try devices.app(again) == "\(before)|15|t")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        // With other columns, what has been read means nothing.
        try devices.attach(arguments: "token => 'push_token', topic => $$'u'$$, registered_at => 'last_seen'")
        let source = try #require(Int(before)) + 2
        #expect(try devices.app(again) == "\(source)|0|f")
        #expect(try devices.app("SELECT queued, finished FROM tokenkeeper.backfill_next(\(source), 50)") == "40|t")
    }

    @Test func `a row that is logged out is queued as such, as of its registration, unless another row has the token`()
        throws
    {
        let devices = try AttachedDevices()
        try devices.app(
            """
            INSERT INTO app.devices (push_token, last_seen, logged_out_at) VALUES ('aa', '2026-01-01Z', now()), ('bb', '2026-01-01Z', now()),
                ('BB', '2026-01-02Z', NULL), ('cc', NULL, now()), ('dd', now() + interval '1 year', NULL), ('', now(), NULL)
            """)
        try devices.attach()
        let source = try begin(devices)
        #expect(try devices.app("SELECT rows, queued, unreadable FROM tokenkeeper.backfill_next(\(source))") == "6|4|0")
        #expect(
            try devices.database.psql(
                "SELECT token, unregistered, registered_at AT TIME ZONE 'UTC', row_key FROM tokenkeeper.registration ORDER BY 1"
            ) == """
                aa|t|2026-01-01 00:00:00|1
                bb||2026-01-02 00:00:00|3
                cc|t|1970-01-01 00:00:00|4
                dd||1970-01-01 00:00:00|5
                """)
        // Registered since, by the application.
        try devices.database.psql("SELECT tokenkeeper.register('cc', 't')")
        try devices.drain()
        #expect(try devices.states() == "aa unregistered_by_app, bb active, cc active, dd active")
    }

    @Test func `what cannot be understood is rejected once, with the key of its row, however often it is reported`()
        throws
    {
        let devices = try devices(3)
        try devices.app("UPDATE app.devices SET push_token = 'no hex ' || id % 2")
        try devices.forgetQueue()
        var daemon = try devices.database.connect(user: "a_daemon")
        for rejected in [2, 0, 0] {
            let source = try begin(devices)
            #expect(try devices.app("SELECT queued, unreadable FROM tokenkeeper.backfill_next(\(source))") == "3|3")
            #expect(try drainAll(&daemon).registrations.rejected == rejected)
        }
        try devices.app("UPDATE app.devices SET badge = 1, user_id = 3")
        try devices.app("UPDATE app.devices SET push_token = 'zz' WHERE id = 1")
        #expect(try drainAll(&daemon).registrations.rejected == 1)
        #expect(
            try devices.database.psql(
                "SELECT token, row_key, attachment, error FROM tokenkeeper.rejected_registration ORDER BY 1")
                    == """
                    no hex 0|2|1|token is 'no hex 0' (8 characters), expected 1 to 512 bytes in hex; row '2' of app.devices
                    no hex 1|1|1|token is 'no hex 1' (8 characters), expected 1 to 512 bytes in hex; row '1' of app.devices
                    zz|1|1|token is 'zz' (2 characters), expected 1 to 512 bytes in hex; row '1' of app.devices
                    """)
        // What applications send themselves is rejected each time.
        for _ in 1...2 {
            try devices.app("INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'zz')")
            #expect(try drainAll(&daemon).registrations.rejected == 1)
        }
    }

    @Test func `the rows of a table leave the limit of rejected rows to applications`() throws {
        let devices = try devices(3)
        try devices.app("UPDATE app.devices SET push_token = 'no hex ' || id")
        try devices.forgetQueue()
        let source = try begin(devices)
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))")
        var daemon = try devices.database.connect(user: "a_daemon")
        func drain() throws -> Drain.Pass.Registrations {
            let drain = Drain(
                lockTimeout: .milliseconds(50), guardLimits: .off, rejectedPerHour: 2,
                interpret: Interpretation.verdict(on:))
            return try drainAll(&daemon, drain: drain).registrations
        }
        #expect(try drain() == .init(rejected: 3))
        try devices.app("INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'x'), ('t', 'y'), ('t', 'z')")
        #expect(try drain() == .init(rejected: 3, notKept: 1))
        #expect(try devices.database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "5")
    }

    @Test func `a logout of a source that the database does not know is rejected`() throws {
        let devices = try devices(1)
        try devices.drain()
        try devices.app(
            "INSERT INTO tokenkeeper.registration (topic, token, unregistered, source_id) VALUES ('t', '0001', true, 77)"
        )
        try devices.drain()
        #expect(
            try devices.database.psql("SELECT error FROM tokenkeeper.rejected_registration")
                == "source_id is 77, which this database does not know")
    }
}
