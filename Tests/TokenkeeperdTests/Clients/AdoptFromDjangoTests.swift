import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

/// Follows docs/how-to/adopt-from-django.md, command by command, with the real django-push-notifications and 20,000 messy devices, or
/// 200,000 with `TEST_SOAK=whole`.
@Suite(.ownThread) struct `Adopting from Django` {
    private static let table = "push_notifications_apnsdevice"
    /// Independent of parse_token.
    private static let clean = "lower(regexp_replace(d.registration_id, '[[:space:]<>]', '', 'g'))"
    private static let environment = "CASE d.application_id WHEN 'ios' THEN 'production' ELSE 'sandbox' END"
    /// The devices whose token the ledger must have.
    private static let good = "FROM \(table) AS d WHERE d.application_id IS NOT NULL AND \(clean) ~ '^([0-9a-f]{2})+$'"

    private static let devices = Soak.size(20_000, whole: 200_000)

    @Test func `no row is skipped silently, from messy devices to a full ledger and back`() throws {
        let host = try DjangoHost { _ in nil }
        let text = try String(
            contentsOf: PackagedProgram.repository.appendingPathComponent("docs/how-to/adopt-from-django.md"),
            encoding: .utf8)
        let page = try DjangoHost.commands(of: text)
        try #require(page.count == 8, "with the five of the installation, thirteen: \(page)")
        try host.run("python manage.py migrate --verbosity 0")
        try host.run("python fill.py \(Self.devices)")
        let rows = "SELECT md5(string_agg(d::text, ',' ORDER BY id)) FROM \(Self.table) AS d"
        let untouched = try host.database.psql(rows, user: "postgres")

        // Attach and import.
        for command in page[0...2] { try host.run(command) }
        try eventually("all is applied") {
            try host.database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0"
        }
        #expect(
            try host.database.psql(
                """
                SELECT s.queued + (SELECT count(*) FROM \(Self.table) WHERE registration_id = ''),
                       (SELECT count(*) > 100 FROM tokenkeeper.rejected_registration)
                FROM tokenkeeper.registration_source AS s WHERE kind = 'backfill'
                """, user: "postgres") == "\(Self.devices)|t", "each row is queued, or has no token")
        let wanted = "SELECT \(Self.environment) AS environment, \(Self.clean) AS token \(Self.good)"
        let known = "SELECT environment, token FROM tokenkeeper.token"
        for (some, others) in [(wanted, known), (known, wanted)] {
            #expect(
                try host.database.psql("SELECT count(*) FROM (\(some) EXCEPT \(others)) AS x", user: "postgres") == "0")
        }
        #expect(try host.database.psql(rows, user: "postgres") == untouched)

        // The copies of the rejected rows are deleted once someone has looked at them.
        try host.run(page[3])
        #expect(try host.database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "0")

        // Observe. The apps of some devices were deleted a month ago.
        let dead = try host.database.psql(
            "SELECT DISTINCT \(Self.clean) \(Self.good) AND d.active AND d.id BETWEEN 201 AND 260", user: "postgres"
        ).split(separator: "\n").map(String.init)
        for token in dead { host.apns.deaths.die(token, .init(at: FakeOptions.systemClock() - 30 * 86_400_000)) }
        try host.run(page[4].replacing("/usr/share/doc/tokenkeeperd", with: PackagedProgram.repository.path))
        let settings = try #require(text.firstMatch(of: #/```python\n *(INSTALLED_APPS .*)\n/#)?.output.1)
        try host.addSettings(String(settings))
        let gone = FakeOutcome(410, "Unregistered")
        func stale() throws -> Int? {
            Int(try host.database.psql("SELECT count(*) FROM tokenkeeper.token WHERE state = 'stale'"))
        }
        // The library waits a second for each response. On a busy machine some come later, and the next push finds them.
        var pushes = 0
        while try stale() != dead.count, pushes < 20 {
            try host.run("python send.py 201 400")
            pushes += 1
            try eventually("the results are recorded") {
                try host.database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0"
            }
        }
        #expect(try stale() == dead.count && dead.count > 20)
        let observed = host.apns.records.outcomes[gone] ?? 0
        #expect(observed >= dead.count)
        try host.run("python send.py 201 400")
        let sent = host.apns.records.outcomes[gone] ?? 0
        #expect(sent > observed, "the gate only observes")
        #expect(try host.database.psql(rows, user: "postgres") == untouched, "the library deactivates no device")
        try host.run(page[5])

        // Enforce.
        try host.run(page[6])
        try host.run("python send.py 201 400")
        #expect(host.apns.records.outcomes[gone] == sent, "they are withheld")

        // Leave.
        try host.run(page[7])
        #expect(
            try host.database.psql(
                """
                SELECT (SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tokenkeeper%') + (SELECT count(*) FROM pg_proc
                    WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'tokenkeeper%')
                """) == "0")
    }
}
