import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) final class `A folder of settings` {
    private let folder = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString)"

    init() throws {
        for name in ["", "/conf.d", "/credentials", "/apns"] {
            try FileManager.default.createDirectory(atPath: folder + name, withIntermediateDirectories: true)
        }
    }

    deinit { try? FileManager.default.removeItem(atPath: folder) }

    private func write(_ name: String, _ text: String) throws {
        try text.write(toFile: "\(folder)/\(name)", atomically: true, encoding: .utf8)
        chmod("\(folder)/\(name)", 0o600)
    }

    private func checkConfig(_ arguments: [String]) throws -> ProgramRun {
        try ProgramRun([DaemonProcess.program, "check-config"] + arguments)
    }

    @Test func `the fragments in conf.d are read after the file, in the order of their names`() throws {
        try write("tokenkeeperd.toml", "[sweep]\ninterval = \"2h\"\nbatch = 7\n")
        try write("conf.d/9.toml", "[sweep]\ninterval = \"4h\"\n")
        try write("conf.d/10.toml", "[sweep]\ninterval = \"3h\"\n[log]\nlevel = \"debug\"\n")
        for (name, why) in [(".hidden.toml", "hidden"), ("a.toml~", "another ending"), ("b.toml.dpkg-new", "dpkg's")] {
            try write("conf.d/\(name)", "\(why) = 1\n")
        }
        for form in [folder, folder + "/"] {
            let found = try checkConfig(["--config", form])
            #expect(found.status == 0 && found.errors.isEmpty, "\(found)")
            #expect(found.output.contains("sweep.interval = 4h  # \(folder)/conf.d/9.toml:2\n"), "10 sorts before 9")
            #expect(found.output.contains("sweep.batch = 7  # \(folder)/tokenkeeperd.toml:3\n"))
            #expect(found.output.contains("log.level = debug  # \(folder)/conf.d/10.toml:4\n"))
        }
        // Somebody who names the file wants only the file.
        let alone = try checkConfig(["--config", folder + "/tokenkeeperd.toml"])
        #expect(alone.output.contains("sweep.interval = 2h  # \(folder)/tokenkeeperd.toml:2\n"), "\(alone)")
    }

    @Test func `a mistake in a fragment is refused with its file, and so is a folder without any file`() throws {
        let empty = try checkConfig(["--config", folder])
        #expect(empty.status == 78)
        #expect(empty.errors.contains("\(folder): has neither tokenkeeperd.toml nor conf.d/*.toml"), "\(empty)")
        try write("conf.d/a.toml", "[sweep]\nbatch = 7\n")
        #expect(try checkConfig(["--config", folder]).status == 0, "the file itself may be missing")
        try write("conf.d/b.toml", "[sweep]\nbatch = 0\n")
        try FileManager.default.createDirectory(atPath: folder + "/conf.d/c.toml", withIntermediateDirectories: true)
        #expect(
            try checkConfig(["--config", folder]).errors.contains(
                "\(folder)/conf.d/c.toml: cannot be read: Is a directory"))
        try FileManager.default.removeItem(atPath: folder + "/conf.d/c.toml")
        let wrong = try checkConfig(["--config", folder])
        #expect(wrong.status == 78 && wrong.errors.contains("\(folder)/conf.d/b.toml:2: sweep.batch is 0"), "\(wrong)")
    }

    @Test func `its credentials and apns are the service's`() throws {
        let made = try ProgramRun(
            ["/usr/bin/openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"])
        try write("apns/key.p8", made.output)
        try write("credentials/password", "hunter2\n")
        try write(
            "tokenkeeperd.toml",
            "[credential.main]\nkey_file = \"key.p8\"\nkey_id = \"ABC1234567\"\nteam_id = \"TEAM123456\"\ntopics = [\"t\"]\n"
        )
        let found = try checkConfig(["--config", folder])
        #expect(found.status == 0 && !found.output.contains("hunter2"), "\(found)")
        #expect(found.output.contains("database_password_file = \(folder)/credentials/password  # credential\n"))
        #expect(found.output.contains("# credential main: provider token for t"))
    }

    @Test func `a password in a fragment that others can read is warned of by the fragment's name`() throws {
        try write("tokenkeeperd.toml", "[sweep]\nbatch = 7\n")
        try write("conf.d/url.toml", "database_url = \"postgresql://u:hunter2@h/db\"\n")
        chmod("\(folder)/tokenkeeperd.toml", 0o644)
        #expect(try checkConfig(["--config", folder]).errors.isEmpty)
        chmod("\(folder)/conf.d/url.toml", 0o644)
        let open = try checkConfig(["--config", folder])
        #expect(
            open.errors.contains("warning: \(folder)/conf.d/url.toml contains a password")
                && !open.errors.contains("/tokenkeeperd.toml") && !open.errors.contains("hunter2"), "\(open)")
    }

    @Test func `a reload reads all of them`() throws {
        let database = try TestCluster.shared.database()
        try write("tokenkeeperd.toml", "[sweep]\ninterval = \"2h\"\n")
        let daemon = try DaemonProcess(database.url(), arguments: ["--config", folder])
        try eventually("it works") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        try write("conf.d/sweep.toml", "[sweep]\ninterval = \"3h\"\n")
        daemon.signal(SIGHUP)
        try eventually("it reads the new fragment") { daemon.logged.contains("sweep.interval: 2h -> 3h") }
        try write("conf.d/sweep.toml", "[sweep]\ninterval = \"soon\"\n")
        daemon.signal(SIGHUP)
        try eventually("it names the fragment") {
            daemon.logged.contains("reload refused") && daemon.logged.contains("\(folder)/conf.d/sweep.toml:2: ")
        }
        #expect(daemon.stop() == 0)
    }
}

@Suite struct `The units` {
    private func file(_ path: String) throws -> String {
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../..")
        return try String(contentsOf: root.appendingPathComponent(path), encoding: .utf8)
    }

    @Test func `the template differs from the service only in its name and its folders`() throws {
        var expected = try file("systemd/tokenkeeperd.service")
        for (of, here) in [
            ("systemctl edit tokenkeeperd`", "systemctl edit tokenkeeperd@`"),
            ("inside PostgreSQL\nDocumentation", "inside PostgreSQL: %i\nDocumentation"),
            (
                "Environment=BOOT_ID=%b\n",
                "Environment=BOOT_ID=%b\nEnvironment=TOKENKEEPER_CONFIG=/etc/tokenkeeperd/%i\n"
                    + "Environment=TOKENKEEPER_SEND_PROVIDER_TOKEN_DIRECTORY=%t/tokenkeeperd.provider-tokens\n"
            ),
            ("=database:/etc/tokenkeeperd/credentials\n", "=database:/etc/tokenkeeperd/%i/credentials\n"),
            ("=apns:/etc/tokenkeeperd/apns\n", "=apns:/etc/tokenkeeperd/%i/apns\n"),
            (
                "stops, until the machine does.\nRuntimeDirectory=tokenkeeperd\n",
                "stops, until the machine does. All instances share the second one, so that they send with one provider token of a key.\n"
                    + "RuntimeDirectory=tokenkeeperd-%i tokenkeeperd.provider-tokens\n"
            ),
        ] {
            #expect(expected.contains(of), "\(of)")
            expected = expected.replacingOccurrences(of: of, with: here)
        }
        #expect(try file("systemd/tokenkeeperd@.service") == expected)
    }
}
