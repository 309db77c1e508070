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
        try devices.attach(arguments: "token => 'push_token', topic_value => 'u', registered_at => 'last_seen'")
        let source = try #require(Int(before)) + 2
        #expect(try devices.app(again) == "\(source)|0|f")
        #expect(try devices.app("SELECT queued, finished FROM tokenkeeper.backfill_next(\(source), 50)") == "40|t")
    }

    @Test func `an infinite stale_at queues no 410`() throws {
        let devices = try AttachedDevices()
        try devices.app(
            """
            ALTER TABLE app.devices ADD gone_at timestamptz;
            INSERT INTO app.devices (push_token, last_seen, gone_at)
            VALUES ('aa', now(), 'infinity'), ('bb', now(), '-infinity'), ('cc', now(), '2026-01-01Z'), ('dd', now(), NULL)
            """)
        try devices.attach("stale_at => 'gone_at'")
        let source = try begin(devices)
        #expect(try devices.app("SELECT queued, stale FROM tokenkeeper.backfill_next(\(source))") == "4|1")
        #expect(
            try devices.database.psql("SELECT token, body FROM tokenkeeper.send_result")
                == #"cc|{"reason":"Unregistered","timestamp":1767225600000}"#)
    }

    @Test func `the rows that a backfill refuses leave room for those of applications`() throws {
        let devices = try devices(3)
        try devices.app("UPDATE app.devices SET push_token = 'no hex ' || id")
        try devices.forgetQueue()
        let source = try begin(devices)
        #expect(try devices.app("SELECT queued, refused FROM tokenkeeper.backfill_next(\(source))") == "0|3")
        try devices.app("INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'x'), ('t', 'y'), ('t', 'z')")
        var daemon = try devices.database.connect(user: "a_daemon")
        let drain = Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, rejectedPerHour: 2,
            interpret: Interpretation.verdict(on:))
        #expect(try drainAll(&daemon, drain: drain).registrations == .init(rejected: 3, notKept: 1))
        #expect(try devices.database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "5")
    }
}
