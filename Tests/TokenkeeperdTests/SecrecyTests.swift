import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `Secrets` {
    @Test func `a file is too open by the rule that libpq has for keys`() {
        func isTooOpen(_ mode: mode_t, owner: uid_t) -> Bool {
            SecretFile("f", mode: 0o100000 | mode, owner: owner, group: 7).isTooOpen
        }
        for mode in [0o600, 0o400, 0o640, 0o440] as [mode_t] { #expect(!isTooOpen(mode, owner: 0)) }
        for mode in [0o644, 0o604, 0o660, 0o650, 0o666] as [mode_t] { #expect(isTooOpen(mode, owner: 0)) }
        for mode in [0o600, 0o400, 0o700] as [mode_t] { #expect(!isTooOpen(mode, owner: 1000)) }
        for mode in [0o640, 0o644, 0o604, 0o610] as [mode_t] { #expect(isTooOpen(mode, owner: 1000)) }
    }

    @Test func `the warning names the file, and the command that closes it and leaves it readable`() {
        func warning(owner: uid_t, group: gid_t, user: uid_t = 990) -> String {
            SecretFile("/a b", mode: 0o100644, owner: owner, group: group)
                .warning(processGroup: 991, processUser: user) ?? ""
        }
        #expect(warning(owner: 990, group: 0).hasPrefix("/a b holds a secret, and others"))
        #expect(warning(owner: 990, group: 0).hasSuffix("(mode 0644): run `chmod 600 '/a b'`"))
        #expect(warning(owner: 0, group: 991).hasSuffix("run `chmod 640 '/a b'`"))
        #expect(warning(owner: 0, group: 0).hasSuffix("run `chgrp 991 '/a b' && chmod 640 '/a b'`"))
        #expect(warning(owner: 0, group: 0, user: 0).hasSuffix("run `chmod 600 '/a b'`"))
    }

    @Test func `check-config and run warn of each file that others can read, except files from systemd`()
        throws
    {
        let folder = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString)"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        func file(_ name: String, _ text: String, mode: Int) throws {
            try text.write(toFile: "\(folder)/\(name)", atomically: true, encoding: .utf8)
            try FileManager.default.setAttributes([.posixPermissions: mode], ofItemAtPath: "\(folder)/\(name)")
        }
        let made = try ProgramRun(
            ["/usr/bin/openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"])
        try file("key.p8", made.output, mode: 0o644)
        try file("password", "secret\n", mode: 0o644)
        try file(
            "t.toml",
            """
            database_password_file = "\(folder)/password"
            [credential.main]
            key_file = "\(folder)/key.p8"
            key_id = "ABC1234567"
            team_id = "TEAM123456"
            topics = ["com.example.app", "com.example.*"]
            """, mode: 0o644)
        func check(_ environment: [String: String] = [:]) throws -> ProgramRun {
            try ProgramRun(
                [DaemonProcess.program, "check-config", "--config", "\(folder)/t.toml"], environment: environment)
        }
        let open = try check()
        #expect(
            open.status == 0
                && open.output.contains("# credential main: provider token for com.example.app com.example.*"))
        for name in ["key.p8", "password"] {
            #expect(open.errors.contains("warning: \(folder)/\(name) holds a secret"), "\(open.errors)")
            #expect(open.errors.contains("chmod 6"))
        }
        #expect(!open.errors.contains("t.toml"), "it contains no secret")
        let handedOver = try check(["CREDENTIALS_DIRECTORY": folder])
        #expect(handedOver.status == 0 && handedOver.errors.isEmpty, "\(handedOver)")

        let database = try TestCluster.shared.database()
        let daemon = try DaemonProcess(database.url(), arguments: ["--config", "\(folder)/t.toml"])
        try eventually("it warns at the start") { daemon.logged.contains("key.p8 holds a secret") }
        daemon.stop()
        // What is printed before the first entry of the log is JSON, too.
        let inJSON = try DaemonProcess(
            database.url(), settings: ["log.format=json"], arguments: ["--config", "\(folder)/t.toml"])
        try eventually("it has started") { inJSON.logged.contains("\"started\"") }
        inJSON.stop()
        let warnings = try jsonLines(inJSON.logged).filter { $0["level"] == "warning" }.compactMap { $0["message"] }
        #expect(warnings.contains { $0.hasPrefix("\(folder)/key.p8 holds a secret") }, "\(warnings)")

        for name in ["key.p8", "password"] {
            try FileManager.default.setAttributes([.posixPermissions: 0o600], ofItemAtPath: "\(folder)/\(name)")
        }
        let closed = try check()
        #expect(closed.status == 0 && closed.errors.isEmpty, "\(closed)")
    }

    @Test func `a database's URL in the wrong place is not repeated`() throws {
        let url = "postgresql://u:hunter2@h/db"
        for arguments in [
            ["run", url], [url], ["run", "--databse-url", url], ["run", "--databse-url=\(url)"],
            ["status", "host=h", "password=hunter2"], ["status", "host=h password = hunter2"],
            ["status", "host=h", "password", "=", "hunter2"], ["status", "host=h", "Password", "=hunter2"],
            ["status", "--database-url", "password=", "hunter2"],
            ["check-config", "--set", "log.level=host=h password=hunter2"],
            ["check-config", "--set", "log.level=host=h password\t= hunter2"],
            ["check-config", "--set", "database_password_file=\(url)"],
            ["check-config", "--config", url], ["explain", "--environment", "x", "a", url], ["run", "--", url],
        ] {
            let refused = try ProgramRun([DaemonProcess.program] + arguments)
            #expect(refused.status != 0, "\(arguments)")
            #expect(!(refused.errors + refused.output).contains("hunter2"), "\(arguments): \(refused.errors)")
        }
        let refused = try ProgramRun([DaemonProcess.program, "run", url])
        #expect(refused.status == 64 && refused.errors.contains("--database-url"), "\(refused)")
        let other = try ProgramRun([DaemonProcess.program, "run", "nonsense"])
        #expect(other.status == 64 && other.errors.contains("'nonsense'"), "a harmless argument is repeated")
        let both = try ProgramRun([DaemonProcess.program, "status", "--database-url", url, "nonsense"])
        #expect(both.status == 64 && both.errors.contains("'nonsense'") && !both.errors.contains("hunter2"), "\(both)")
        #expect(!StrayAddress.isLikely("the password is in /etc/password, key=value"))
    }

    /// Also when the tests run as root: then the daemon runs as another user.
    @Test func `the daemon makes no core dump, and other processes of its user cannot inspect it`() throws {
        let database = try TestCluster.shared.database()
        let daemon = Process()
        let isRoot = geteuid() == 0
        let command = [DaemonProcess.program, "run"]
        daemon.executableURL = URL(fileURLWithPath: isRoot ? "/usr/bin/setpriv" : command[0])
        let user = isRoot ? uid_t(65534) : geteuid()
        daemon.arguments =
            isRoot ? ["--reuid=\(user)", "--regid=\(user)", "--clear-groups"] + command : Array(command.dropFirst())
        daemon.environment = ["TOKENKEEPER_DATABASE_URL": database.url()]
        daemon.standardError = FileHandle.nullDevice
        try daemon.run()
        defer {
            daemon.terminate()
            daemon.waitUntilExit()
        }
        try eventually("it works") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        let status = try String(contentsOfFile: "/proc/\(daemon.processIdentifier)/status", encoding: .utf8)
        #expect(status.contains("\nUid:\t\(user)\t\(user)\t"), "it is that user's")
        // The kernel makes root their owner if the process may not be dumped: proc(5), prctl(2).
        for place in ["environ", "mem", "maps"] {
            var about = stat()
            #expect(stat("/proc/\(daemon.processIdentifier)/\(place)", &about) == 0)
            #expect(about.st_uid == 0, "\(place)")
        }
    }
}
