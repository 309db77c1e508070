import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// Runs `replace`, which keeps the token `chosen`. Returns what was kept before.
private func kept(_ file: ProviderTokenFile, chosen: String) throws -> String? {
    var found: String?
    try file.replace { kept in
        found = kept
        return chosen
    }
    return found
}

private func mode(_ path: String) -> mode_t {
    var about = stat()
    return lstat(path, &about) == 0 ? about.st_mode : 0
}

@Suite(.ownThread) struct `A provider token's file` {
    private let directory: TemporaryDirectory

    init() throws {
        directory = try TemporaryDirectory()
    }

    private func file(user: uid_t = geteuid()) -> ProviderTokenFile {
        ProviderTokenFile(in: directory.path, keyID: "ABC1234567", teamID: "TEAM123456", user: user, logger: nil)
    }

    @Test func `it keeps the last token, in a file that only the user can read`() throws {
        #expect(try kept(file(), chosen: "one") == nil)
        #expect(mode(file().path) == 0o100600)
        #expect(try kept(file(), chosen: "another one") == "one")
        #expect(try kept(file(), chosen: "x") == "another one")
        #expect(mode(file().path) == 0o100600)
        #expect(
            try FileManager.default.contentsOfDirectory(atPath: directory.path) == [
                "provider-token-TEAM123456-ABC1234567"
            ])
    }

    @Test(arguments: [0o644, 0o640, 0o602, 0o677]) func `one that others may read or write is replaced`(open: Int)
        throws
    {
        _ = try kept(file(), chosen: "one")
        try FileManager.default.setAttributes([.posixPermissions: open], ofItemAtPath: file().path)
        #expect(try kept(file(), chosen: "two") == nil)
        #expect(mode(file().path) == 0o100600)
        #expect(try kept(file(), chosen: "two") == "two")
    }

    @Test func `another user's file is not used`() throws {
        _ = try kept(file(), chosen: "one")
        #expect(try kept(file(user: geteuid() + 1), chosen: "one") == nil)
        #expect(try kept(file(), chosen: "one") == "one")
    }

    @Test func `a symbolic link is not followed, neither to read nor to write`() throws {
        let other = directory.path + "/other"
        try "not ours".write(toFile: other, atomically: true, encoding: .utf8)
        try FileManager.default.setAttributes([.posixPermissions: 0o600], ofItemAtPath: other)
        try FileManager.default.createSymbolicLink(atPath: file().path, withDestinationPath: other)
        #expect(try kept(file(), chosen: "one") == nil)
        #expect(try String(contentsOfFile: other, encoding: .utf8) == "not ours")
        #expect(try mode(file().path) == 0o100600 && kept(file(), chosen: "one") == "one")
    }

    @Test func `a pipe, an empty file, a long one, and one that is no text are not used`() throws {
        #expect(mkfifo(file().path, 0o600) == 0)
        #expect(try kept(file(), chosen: "one") == nil)
        for content in [Data(), Data(repeating: 0x41, count: 1025), Data([0xff, 0xfe])] {
            try content.write(to: URL(fileURLWithPath: file().path))
            try FileManager.default.setAttributes([.posixPermissions: 0o600], ofItemAtPath: file().path)
            #expect(try kept(file(), chosen: "one") == nil, "\(content)")
        }
        _ = try kept(file(), chosen: String(repeating: "A", count: 1024))
        #expect(try kept(file(), chosen: "one")?.count == 1024)
    }

    @Test func `what a killed process left of a file does not matter`() throws {
        let left = "\(file().path).\(getpid())"
        try "half".write(toFile: left, atomically: true, encoding: .utf8)
        #expect(try kept(file(), chosen: "one") == nil)
        #expect(try kept(file(), chosen: "one") == "one" && !FileManager.default.fileExists(atPath: left))
    }

    @Test func `without the directory, or with something in the way, the token is not kept and sending goes on`() throws
    {
        try FileManager.default.createDirectory(atPath: file().path, withIntermediateDirectories: true)
        #expect(try kept(file(), chosen: "one") == nil)
        #expect(try kept(file(), chosen: "one") == nil)
        #expect(try FileManager.default.contentsOfDirectory(atPath: directory.path).count == 1)
        let none = ProviderTokenFile(in: directory.path + "/none", keyID: "A", teamID: "B", logger: nil)
        #expect(try kept(none, chosen: "one") == nil)
        #expect(try kept(none, chosen: "one") == nil)
    }

    @Test func `processes that replace it at once see each other's tokens`() throws {
        let (threads, turns) = (4, 50)
        let done = DispatchGroup()
        let path = directory.path
        for _ in 0..<threads {
            done.enter()
            Thread.detachNewThread {
                // A file object of its own, as another process would have: flock(2) tells open files apart, not processes.
                let file = ProviderTokenFile(
                    in: path, keyID: "A", teamID: "B", patience: .seconds(600), logger: nil)
                for _ in 0..<turns { try? file.replace { kept in "\((kept.flatMap(Int.init) ?? 0) + 1)" } }
                done.leave()
            }
        }
        done.wait()
        let file = ProviderTokenFile(in: path, keyID: "A", teamID: "B", logger: nil)
        #expect(try kept(file, chosen: "end") == "\(threads * turns)")
    }

    @Test func `of two keys under one identifier, only one has a file`() throws {
        let files = try SendingStage.authority.get()
        let other = try files.makeKey(id: "TWICE12345", team: "TEAM123456")
        let second = try files.makeKey(id: "TWICE12345", team: "TEAM123456")
        var tokens = ProviderTokens(keptIn: directory.path)
        for key in [other.file, second.file, other.file] {
            let settings = try Configuration(
                files: [], environment: [:],
                flags: ["key_file=\(key)", "key_id=TWICE12345", "team_id=TEAM123456", "topics=t"].map {
                    "credential.main.\($0)"
                }
            ).credentials[0]
            let text = try LoadedCredential(settings, folders: [], &tokens).identity.authorization?()
            let stored = try String(
                contentsOfFile: directory.path + "/provider-token-TEAM123456-TWICE12345", encoding: .utf8)
            #expect((stored == text) == (key == other.file))
        }
    }
}

/// With a fake APNs that refuses a new provider token within 20 minutes of the last one, as APNs does.
@Suite(.ownThread) struct `A restart` {
    private func tokens(_ stage: SendingStage) -> Set<String> {
        Set(stage.apns.records.exchanges.compactMap(\.request.providerToken))
    }

    /// - Parameter last: What to do with the daemon at its end.
    private func sendOnce(
        _ stage: SendingStage, _ settings: [String], _ last: (DaemonProcess) -> Void = { _ = $0.stop() }
    ) throws -> DaemonProcess {
        let daemon = try stage.daemon(settings)
        try stage.enqueue()
        try stage.settled()
        last(daemon)
        return daemon
    }

    @Test func `three restarts within a minute use one provider token, which no log shows`() throws {
        let directory = try TemporaryDirectory()
        let stage = try SendingStage { $0.tokenUpdates = .every20MinutesPerServer }
        defer { stage.apns.stop() }
        try stage.register(1...5)
        let settings = ["runtime_directory=\(directory.path)", "log.level=trace"]
        var daemons = [
            try sendOnce(stage, settings) {
                $0.signal(SIGKILL)
                $0.wait()
            }
        ]
        // `iat` has whole seconds: tokens of one second might be equal only in their first two parts, never in the signature.
        for _ in 0..<3 { daemons.append(try sendOnce(stage, settings)) }
        #expect(try stage.results(200) == 20 && stage.results(429) == 0)
        let token = try #require(tokens(stage).first)
        #expect(tokens(stage).count == 1)
        let path = directory.path + "/provider-token-\(stage.files.signingKey.team)-\(stage.files.signingKey.id)"
        #expect(try String(contentsOfFile: path, encoding: .utf8) == token && mode(path) == 0o100600)
        for part in token.split(separator: ".").dropFirst() {
            for daemon in daemons { #expect(!daemon.logged.contains(part)) }
        }
    }

    /// gorush#512, PyAPNs2#85, apns2#132: several hosts send with one key, each with a token of its own, and APNs refuses all but one of them.
    @Test func `another host that takes over sends with the token that APNs has accepted`() throws {
        let stage = try SendingStage { $0.tokenUpdates = .every20MinutesPerServer }
        defer { stage.apns.stop() }
        try stage.register(1...5)
        // Two credentials have the key.
        let elsewhere =
            ["runtime_directory=/nonexistent"]
            + stage.key.map {
                $0.replacing("credential.main", with: "credential.too").replacing(
                    "com.example.*", with: "org.example.*")
            }
        let first = try stage.daemon(elsewhere)
        try stage.enqueue()
        try stage.settled()
        try eventually("its token is shared") { try stage.count("provider_token") == 1 }
        first.signal(SIGKILL)
        first.wait()
        _ = try sendOnce(stage, elsewhere)
        #expect(try stage.results(200) == 10 && stage.results(429) == 0 && tokens(stage).count == 1)
        let token = try #require(tokens(stage).first)
        let row = try stage.database.psql("SELECT sealed FROM tokenkeeper.provider_token", user: "a_daemon")
        #expect(!row.isEmpty && token.split(separator: ".").allSatisfy { !row.contains($0) })
        // The row is lost, with the primary for example: the next daemon still has a token, and shares it as it stops.
        let third = try stage.daemon(elsewhere)
        try eventually("it has taken the token") { try stage.count("sending_daemon", "stopped_at IS NULL") == 1 }
        try stage.enqueue()
        try stage.settled()
        try stage.database.psql("DELETE FROM tokenkeeper.provider_token")
        #expect(third.stop() == 0)
        #expect(try stage.count("provider_token") == 1)
        _ = try sendOnce(stage, elsewhere)
        #expect(try stage.results(429) == 0 && tokens(stage).count == 1)
    }

    @Test func `a table of tokens that cannot be used stops nothing, and is reported`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...5)
        try stage.database.psql("REVOKE ALL ON tokenkeeper.provider_token FROM tokenkeeper_daemon")
        _ = try sendOnce(stage, []) { daemon in
            try? eventually("it is reported") { daemon.logged.contains("share provider tokens") }
            #expect(daemon.logged.contains("share provider tokens"), "\(daemon.logged)")
            _ = daemon.stop()
        }
        #expect(try stage.results(200) == 5)
    }

    @Test func `two hosts that begin at once soon send with one token`() throws {
        let stage = try SendingStage { $0.tokenUpdates = .every20MinutesPerServer }
        defer { stage.apns.stop() }
        try stage.register(1...100)
        let daemons = try (0..<2).map { _ in try stage.daemon(["runtime_directory=/nonexistent"]) }
        try eventually("both have sent, and one token is shared", within: SendingStage.longest) {
            try stage.enqueue()
            try stage.settled()
            return try stage.count("provider_token") == 1 && stage.apns.records.connections >= 2
        }
        // If APNs refuses the token of one of them, that one takes the other's.
        try eventually("nothing is refused any more", within: SendingStage.longest) {
            let before = try stage.results(429)
            for _ in 1...3 {
                try stage.enqueue()
                try stage.settled()
            }
            return try stage.results(429) == before
        }
        #expect(try stage.count("failed_send") == 0)
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a token that was damaged or cannot be kept stops nothing`() throws {
        let directory = try TemporaryDirectory()
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...5)
        let settings = ["runtime_directory=\(directory.path)"]
        func sendOnce(_ stage: SendingStage, _ settings: [String]) throws -> DaemonProcess {
            // Or that one is taken.
            try stage.database.psql("DELETE FROM tokenkeeper.provider_token")
            return try self.sendOnce(stage, settings)
        }
        _ = try sendOnce(stage, settings)
        let path = directory.path + "/provider-token-\(stage.files.signingKey.team)-\(stage.files.signingKey.id)"
        var text = try String(contentsOfFile: path, encoding: .utf8)
        text.removeLast(2)
        try text.write(toFile: path, atomically: false, encoding: .utf8)
        _ = try sendOnce(stage, settings)
        #expect(try tokens(stage).contains(String(contentsOfFile: path, encoding: .utf8)), "it was replaced")
        try FileManager.default.removeItem(atPath: path)
        try FileManager.default.createDirectory(atPath: path, withIntermediateDirectories: true)
        let daemon = try sendOnce(stage, settings)
        #expect(try stage.results(200) == 15 && tokens(stage).count == 3)
        let warning = "the provider token cannot be kept"
        #expect(daemon.logged.components(separatedBy: warning).count == 2, "\(daemon.logged)")
    }

    @Test
    func `daemons of two databases, each with a runtime directory of its own, share a directory for provider tokens`()
        throws
    {
        let shared = try TemporaryDirectory()
        let stage = try SendingStage { $0.tokenUpdates = .every20MinutesPerServer }
        defer { stage.apns.stop() }
        let other = try TestCluster.shared.database()
        try other.addQueueFunction()
        var daemons: [DaemonProcess] = []
        let directories = [try TemporaryDirectory(), try TemporaryDirectory()]
        for (database, own) in zip([stage.database, other], directories) {
            try database.psql(
                "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(stage.topic)', tags => '{World}')) FROM generate_series(1, 20) AS i",
                user: "a_app")
            try database.psql(
                #"SELECT public.queue('{"aps":{"alert":"Hello"}}', '\#(stage.topic)', tags => '{World}')"#,
                user: "postgres")
            daemons.append(
                try DaemonProcess(
                    database.url(),
                    settings: stage.servers + stage.key + ["send.provider_token_directory=\(shared.path)"],
                    environment: ["RUNTIME_DIRECTORY": own.path]))
            try eventually("its responses are recorded") {
                try database.psql("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat WHERE status = 200")
                    == "20"
            }
            #expect(
                try FileManager.default.contentsOfDirectory(atPath: own.path).filter { $0.hasPrefix("provider-token") }
                    == [])
        }
        #expect(tokens(stage).count == 1)
        let path = shared.path + "/provider-token-\(stage.files.signingKey.team)-\(stage.files.signingKey.id)"
        #expect(try String(contentsOfFile: path, encoding: .utf8) == tokens(stage).first && mode(path) == 0o100600)
        for daemon in daemons { #expect(daemon.stop() == 0) }
        withExtendedLifetime(directories) {}
    }

    @Test func `two daemons with one directory send with one provider token`() throws {
        let directory = try TemporaryDirectory()
        let stage = try SendingStage { $0.tokenUpdates = .every20MinutesPerServer }
        defer { stage.apns.stop() }
        try stage.register(1...2000)
        try stage.enqueue()
        let settings = ["runtime_directory=\(directory.path)", "send.max_in_flight=20"]
        let daemons = try (0..<2).map { _ in try stage.daemon(settings) }
        try eventually("both send") { stage.apns.records.connections >= 2 }
        try stage.settled()
        #expect(tokens(stage).count == 1)
        #expect(try stage.results(200) == 2000 && stage.results(429) == 0)
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }
}
