import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

private func run(_ arguments: [String], url: String? = nil, environment: [String: String] = [:]) throws -> ProgramRun {
    try ProgramRun(
        [DaemonProcess.program] + arguments,
        environment: environment.merging(url.map { ["TOKENKEEPER_DATABASE_URL": $0] } ?? [:]) { $1 })
}

@Suite(.ownThread) struct `Commands` {
    @Test func `run on an unmigrated database says which command to run`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        let daemon = try DaemonProcess(database.url(user: "owner"))
        try eventually("it says so") { daemon.logged.contains("run `tokenkeeperd migrate`") }
        for command in ["status", "sweep", "grants"] {
            let refused = try run([command], url: database.url(user: "owner"))
            #expect(
                refused.status == 78 && refused.errors.contains("run `tokenkeeperd migrate`"), "\(command): \(refused)")
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `migrate, grants, and run --migrate`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        let first = try run(["migrate"], url: database.url(user: "owner"))
        #expect(first.status == 0 && first.output.contains("applied version 1 schema"))
        #expect(try run(["migrate"], url: database.url(user: "owner")).output.hasSuffix("\nthe schema is up to date\n"))
        #expect(try run(["grants"], url: database.url(user: "owner")).status == 0)
        let printed = try run(["grants", "--print"])
        #expect(printed.status == 0 && printed.output.contains("GRANT INSERT"))

        let other = try TestCluster.shared.database(migrated: false)
        let daemon = try DaemonProcess(other.url(user: "owner"), arguments: ["--migrate"])
        try eventually("it is migrated") {
            try other.psql("SELECT count(*) FROM pg_tables WHERE tablename = 'daemon' AND schemaname = 'tokenkeeper'")
                == "1"
        }
        // A reader can deadlock with a migration that is still running. Then it reads again.
        try eventually("it is alive") { (try? other.psql("SELECT live_daemons FROM tokenkeeper.status")) == "1" }
        #expect(daemon.stop() == 0)
    }

    @Test func `a role without rights is told what it lacks, and the daemon waits for them`() throws {
        let database = try TestCluster.shared.database()
        let refused = try run(["status"], url: database.url(user: "a_app"))
        #expect(refused.status == 69 && refused.errors.contains("this role lacks rights"))
        let daemon = try DaemonProcess(database.url(user: "a_app"))
        try eventually("it says so") { daemon.logged.contains("see `tokenkeeperd grants`") }
        #expect(daemon.isRunning)
        #expect(daemon.stop() == 0)
    }

    @Test func `status has a form for people and one for programs`() throws {
        let database = try TestCluster.shared.database()
        let people = try run(["status"], url: database.url(user: "a_reader"))
        #expect(
            people.status == 0 && people.output.contains("live daemons")
                && people.output.contains("critical: no daemon has ever run"), "\(people)")
        let json = try run(["status", "--json"], url: database.url(user: "a_reader"))
        let object = try JSONSerialization.jsonObject(with: Data(json.output.utf8)) as? [String: Any]
        #expect(
            object?["live_daemons"] as? Int == 0
                && object?["warnings"] as? [String] == ["no daemon has ever run on this database"])
    }

    @Test func `sweep on the command line records its run and prints what it did`() throws {
        let database = try TestCluster.shared.database()
        let swept = try run(["sweep", "--dry-run"], url: database.url())
        #expect(swept.status == 0 && swept.output.contains("would delete 0 suppressed tokens"))
        #expect(try database.psql("SELECT trigger, dry_run, outcome FROM tokenkeeper.sweep_run") == "cli|t|finished")
        try database.psql(
            "INSERT INTO tokenkeeper.sweep_run (trigger, outcome, started_at, heartbeat_at, daemon_id) VALUES ('timer', 'running', now(), now(), 'other')"
        )
        #expect(try run(["sweep"], url: database.url()).status == 75)
    }

    @Test func `a database that cannot be reached ends a command with 69, without its password`() throws {
        let refused = try run(["status"], url: "postgresql://u:hunter2@127.0.0.1:1/db")
        #expect(refused.status == 69)
        #expect(!refused.errors.contains("hunter2"))
    }

    @Test func `check-config prints what is in force and hides secrets`() throws {
        let file = NSTemporaryDirectory() + "\(UUID().uuidString).toml"
        try
            "database_url = \"postgresql://u:hunter2@h/db\"\n[sweep]\ninterval = \"off\"\n[send]\nproxy = \"http://u:hunter2@h:1\"\n"
            .write(toFile: file, atomically: true, encoding: .utf8)
        defer { try? FileManager.default.removeItem(atPath: file) }
        let good = try run(["check-config", "--config", file])
        #expect(
            good.status == 0 && good.output.contains("sweep.interval = off  # \(file):3")
                && good.output.contains("send.proxy = (set, not shown)") && !good.output.contains("hunter2"))
        try "[sweep]\ninterval = \"soon\"\nfoo = 1\n".write(toFile: file, atomically: true, encoding: .utf8)
        let bad = try run(["check-config"], environment: ["TOKENKEEPER_CONFIG": file])
        #expect(
            bad.status == 78 && bad.errors.contains("\(file):2: sweep.interval")
                && bad.errors.contains("\(file):3: unknown setting"))
        #expect(try run(["check-config", "--config", "/nonexistent"]).status == 78)
        #expect(try run(["no-such-command"]).status == 64)
    }

    @Test func `a password on the command line does not stay in the process list`() throws {
        let database = try TestCluster.shared.database()
        for form in [
            ["--database-url", "PLACE"], ["--database-url=PLACE"], ["--set", "database_url=PLACE"],
            ["--set", "send.proxy=http://u:hunter2@h:1"], ["--set=send.proxy=https://u:hunter2@h:1"],
        ] {
            let url = database.url(user: "a_daemon:hunter2")
            let daemon = Process()
            daemon.executableURL = URL(fileURLWithPath: DaemonProcess.program)
            daemon.arguments = ["run"] + form.map { $0.replacingOccurrences(of: "PLACE", with: url) }
            daemon.environment = ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_daemon")]
            let errors = Pipe()
            daemon.standardError = errors
            try daemon.run()
            try eventually("the password is wiped") {
                let line = try String(contentsOfFile: "/proc/\(daemon.processIdentifier)/cmdline", encoding: .utf8)
                return line.contains("run") && !line.contains("hunter2")
            }
            daemon.terminate()
            daemon.waitUntilExit()
            let said = String(decoding: errors.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
            #expect(said.contains("a password on the command line") && !said.contains("hunter2"))
        }
    }
}
