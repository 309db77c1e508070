import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `The runtime directory` {
    private func load(_ environment: [String: String], flags: [String] = []) throws -> Configuration {
        try Configuration(files: [], environment: environment, flags: flags)
    }

    @Test func `it is the first one that systemd made, unless a setting names another`() throws {
        let ours = try TemporaryDirectory()
        let systemd = try TemporaryDirectory()
        #expect(try load([:]).runtimeDirectory == nil)
        #expect(try load(["RUNTIME_DIRECTORY": ""]).runtimeDirectory == nil)
        #expect(try load(["RUNTIME_DIRECTORY": systemd.path]).runtimeDirectory == systemd.path)
        let both = ["RUNTIME_DIRECTORY": "\(systemd.path):\(ours.path)"]
        #expect(try load(both).runtimeDirectory == systemd.path)
        #expect(try load(both, flags: ["runtime_directory=\(ours.path)"]).runtimeDirectory == ours.path)
        let variable = both.merging(["TOKENKEEPER_RUNTIME_DIRECTORY": ours.path]) { $1 }
        #expect(try load(variable).runtimeDirectory == ours.path)
    }

    @Test func `it is not used if it does not exist, is no directory, is another user's, or is open to others`() throws
    {
        let directory = try TemporaryDirectory()
        func found(_ path: String, user: uid_t = geteuid()) throws -> String {
            let configuration = try load(["RUNTIME_DIRECTORY": path])
            let fault = try #require(RuntimeDirectory(in: configuration.values)).fault(user: user)
            if user == geteuid() { #expect((configuration.runtimeDirectory == nil) == (fault != nil)) }
            return fault ?? ""
        }
        #expect(try found(directory.path) == "")
        #expect(try found(directory.path + "/none").contains("does not exist: create it with mode 0700"))
        #expect(try found("run/tokenkeeperd").contains("expected an absolute path"))
        #expect(try found("/proc/self/status").contains("is not a directory"))
        #expect(try found(directory.path, user: geteuid() + 1).contains("belongs to user \(geteuid())"))
        for mode in [0o750, 0o701, 0o720] {
            try directory.setMode(mode)
            #expect(try found(directory.path).hasSuffix("is open to other users: run `chmod 700 '\(directory.path)'`"))
        }
    }

    @Test
    func
        `provider tokens are in the directory that daemons share, if nobody else has access to it, and else in the daemon's own`()
        throws
    {
        let (shared, own) = (try TemporaryDirectory(), try TemporaryDirectory())
        let flags = ["send.provider_token_directory=\(shared.path)"]
        let both = try load(["RUNTIME_DIRECTORY": own.path], flags: flags)
        #expect(both.providerTokenDirectory == shared.path && both.runtimeDirectory == own.path)
        #expect(try load([:], flags: flags).providerTokenDirectory == shared.path)
        #expect(try load(["RUNTIME_DIRECTORY": own.path]).providerTokenDirectory == own.path)
        try shared.setMode(0o750)
        #expect(both.providerTokenDirectory == own.path)
        let check = try ProgramRun(
            [DaemonProcess.program, "check-config", "--quiet", "--set", flags[0]],
            environment: ["RUNTIME_DIRECTORY": own.path])
        #expect(check.status == 78, "\(check)")
        #expect(
            check.errors.contains(
                "send.provider_token_directory \"\(shared.path)\" is open to other users: run `chmod 700"),
            "\(check)")
        let file = try own.write("database_url = 'postgresql:///x'", to: "t.toml")
        let unit = try ProgramRun(
            [DaemonProcess.program, "check-config", "--config", file],
            environment: ["TOKENKEEPER_SEND_PROVIDER_TOKEN_DIRECTORY": own.path])
        #expect(unit.output.contains("send.provider_token_directory = \(own.path)  # "), "\(unit)")
    }

    @Test func `root checks the directory of the service's user`() throws {
        let directory = try TemporaryDirectory()
        let values = try load(["RUNTIME_DIRECTORY": directory.path]).values
        let found = try #require(RuntimeDirectory(in: values))
        // For a process of root, the directory belongs to another user if these tests do not run as root.
        if geteuid() != 0 { #expect(found.fault(user: 0) != nil) }
        #expect(found.fault(user: 0, rootChecks: true) == nil)
        #expect(found.fault(user: 12345, rootChecks: true) != nil)
    }

    @Test func `an operator cannot judge the directory of the service's user, but root and that user can`() throws {
        let directory = try TemporaryDirectory()
        let found = try #require(RuntimeDirectory(in: try load(["RUNTIME_DIRECTORY": directory.path]).values))
        #expect(found.isOfAnother(than: geteuid() + 1))
        #expect(!found.isOfAnother(than: geteuid()) && !found.isOfAnother(than: 0))
        let missing = try #require(RuntimeDirectory(in: try load(["RUNTIME_DIRECTORY": "/nonexistent"]).values))
        #expect(!missing.isOfAnother(than: 12345), "that nothing is there is a fault for everybody")
    }

    @Test func `check-config refuses an unusable directory that an operator chose, and warns of systemd's`() throws {
        func check(_ environment: [String: String], _ arguments: [String] = []) throws -> ProgramRun {
            try ProgramRun([DaemonProcess.program, "check-config"] + arguments, environment: environment)
        }
        let missing = NSTemporaryDirectory() + "none-\(UUID().uuidString)"
        let systemd = try check(["RUNTIME_DIRECTORY": missing])
        #expect(systemd.status == 0 && systemd.errors.contains("warning: runtime_directory"), "\(systemd)")
        #expect(systemd.output.contains("runtime_directory = \(missing)  # RUNTIME_DIRECTORY\n"))
        let chosen = try check([:], ["--quiet", "--set", "runtime_directory=\(missing)"])
        #expect(chosen.status == 78 && chosen.errors.contains("does not exist"), "\(chosen)")
        let directory = try TemporaryDirectory()
        let good = try check([:], ["--quiet", "--set", "runtime_directory=\(directory.path)"])
        #expect(good.status == 0 && good.errors.isEmpty, "\(good)")
    }

    @Test func `a sending daemon works without it, and warns`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...3)
        try stage.enqueue()
        let daemon = try stage.daemon(["runtime_directory=/nonexistent/of-tokenkeeperd"])
        try stage.settled()
        #expect(daemon.logged.contains("warning: runtime_directory \"/nonexistent/of-tokenkeeperd\" does not exist"))
        #expect(try stage.results(200) == 3 && daemon.stop() == 0)
    }
}
