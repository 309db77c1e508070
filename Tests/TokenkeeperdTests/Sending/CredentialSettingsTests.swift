import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

private func load(_ flags: [String]) throws -> Configuration {
    try Configuration(files: [], environment: [:], flags: flags)
}

private func problems(_ flags: [String]) -> [String] {
    do {
        _ = try load(flags)
        return []
    } catch {
        return (error as? ConfigurationError)?.problems ?? ["\(error)"]
    }
}

@Suite(.ownThread) struct `Credentials in the configuration` {
    static let key = ["key_file=a.p8", "key_id=ABC1234567", "team_id=TEAM123456", "topics=t"].map {
        "credential.main.\($0)"
    }

    @Test func `missing and superfluous settings are reported with the credential's name`() {
        #expect(problems(Self.key) == [])
        #expect(problems(["credential.main.topics=t"]) == ["credential.main: expected key_file or certificate_file"])
        #expect(
            problems(["credential.main.key_file=a.p8"]) == [
                "credential.main: key_file is set, expected key_id too",
                "credential.main: key_file is set, expected team_id too",
                "credential.main: expected topics, such as \"com.example.app\"",
            ])
        #expect(
            problems(Self.key + Self.key.map { $0.replacingOccurrences(of: "main", with: "next") })
                == ["credential.next: topics has t, and so does credential.main: keep one, or set environment in both"])
        #expect(
            problems(Self.key + ["credential.main.certificate_file=b.p12"])
                == ["credential.main: has key_file and certificate_file, expected one of them"])
        #expect(
            problems(Self.key + ["credential.main.topics=com.*.app"]) == [
                "credential.main: topics has com.*.app, expected * at the end only"
            ])
        #expect(
            problems(Self.key + ["credential.main.environment=moon"]) == [
                "command line: credential.main.environment is \"moon\", expected one of production, sandbox, both"
            ])
        #expect(problems(["credential.main.colour=red"]) == ["command line: unknown setting credential.main.colour"])
        #expect(problems(["credential.a b.key_file=x"]) == ["command line: expected key=value, found no key"])
        #expect(
            problems(["send.production_server=apple"]) == [
                "command line: send.production_server is \"apple\", expected a host and a port, such as \"api.push.apple.com:443\""
            ])
    }

    @Test func `the credential with the longest match gets the topic`() throws {
        let flags = ["a": "*", "b": "com.example.*", "c": "com.example.app com.other"].flatMap { name, topics in
            ["key_file=a.p8", "key_id=ABC1234567", "team_id=TEAM123456", "topics=\(topics)"].map {
                "credential.\(name).\($0)"
            }
        }
        let credentials = try load(flags + ["credential.c.environment=production"]).credentials
        func best(_ topic: String, _ environment: String = "production") -> String? {
            CredentialSettings.best(of: credentials, for: .init(environment: environment, topic: topic))?.name
        }
        #expect(best("com.example.app") == "c" && best("com.example.app", "sandbox") == "b")
        #expect(best("com.example.app.voip") == "b" && best("com.other") == "c" && best("com.other.voip") == "a")
        #expect(best("com.example.app", "moon") == nil)
    }

    @Test func `credentials with the same key share one provider token`() throws {
        let files = try SendingStage.authority.get()
        let other = try files.makeKey(id: "OTHERKEY12", team: files.signingKey.team)
        let copy = NSTemporaryDirectory() + "copy-\(UUID().uuidString).p8"
        try ("A copy\n" + String(contentsOfFile: files.signingKeyFile, encoding: .utf8))
            .write(toFile: copy, atomically: true, encoding: .utf8)
        defer { try? FileManager.default.removeItem(atPath: copy) }
        var tokens = ProviderTokens()
        func authorization(_ file: String, id: String? = nil, team: String? = nil) throws -> String {
            let settings = try load(
                [
                    "key_file=\(file)", "key_id=\(id ?? files.signingKey.id)",
                    "team_id=\(team ?? files.signingKey.team)", "topics=t",
                ].map { "credential.main.\($0)" }
            ).credentials[0]
            let credential = try LoadedCredential(settings, folders: [], &tokens)
            return try credential.identity.authorization?() ?? ""
        }
        let first = try authorization(files.signingKeyFile)
        #expect(try authorization(files.signingKeyFile) == first)
        #expect(try authorization(copy) == first, "the same key in another file")
        #expect(try authorization(files.signingKeyFile, id: "ABC1234567") != first)
        #expect(try authorization(files.signingKeyFile, team: "TEAM654321") != first)
        #expect(try authorization(other.file) != first, "another key under the same identifier")
    }

    @Test func `changes of credentials wait for a restart`() throws {
        let live = LiveConfiguration(try load(Self.key))
        let outcome = live.take(
            try load(Self.key + ["credential.main.topics=u", "send.max_in_flight=7", "send.retry_for=2d"]))
        #expect(outcome.waiting == ["send.max_in_flight", "credential.main.topics"])
        #expect(outcome.taken == ["send.retry_for: 1d -> 2d"])
        #expect(live.take(try load([])).waiting.count == 4)
        #expect(live.current.credentials.map(\.topics) == [["t"]])
    }

    private func checkConfig(_ flags: [String], environment: [String: String] = [:]) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "check-config"] + flags.flatMap { ["--set", $0] }, environment: environment)
    }

    @Test func `check-config refuses files that cannot be used, and run names them and goes on`() throws {
        let files = try SendingStage.authority.get()
        let folder = NSTemporaryDirectory() + "credentials-\(UUID().uuidString)"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        func flags(_ change: [String: String]) -> [String] {
            ["key_file": files.signingKeyFile, "key_id": "FAKE123456", "team_id": "TEAM123456", "topics": "t"].merging(
                change
            ) { $1 }
            .map { "credential.main.\($0.key)=\($0.value)" }
        }
        let good = try checkConfig(flags([:]))
        #expect(good.status == 0 && good.output.contains("# credential main: provider token for t\n"))

        for (change, complaint) in [
            (
                ["key_file": "/nonexistent.p8"],
                "credential.main.key_file: /nonexistent.p8 cannot be read: No such file or directory"
            ),
            (["key_file": files.server.certificate], files.server.certificate), (["key_id": "short"], "key id"),
            (["team_id": "lower12345"], "team id"),
        ] {
            let run = try checkConfig(flags(change))
            #expect(run.status == 78 && run.errors.contains(complaint), "\(run.errors)")
            let daemon = try DaemonProcess(
                nil, settings: flags(change) + ["database_url=postgresql://u@127.0.0.1:1/none"])
            try eventually("it is named, and everything else works") {
                daemon.logged.contains(complaint) && daemon.logged.contains("started")
            }
            #expect(daemon.stop() == 0)
        }

        // Nobody writes to it.
        #expect(mkfifo(folder + "/fifo.p8", 0o600) == 0)
        for command in ["check-config", "doctor"] {
            let run = try ProgramRun(
                [DaemonProcess.program, command] + flags(["key_file": folder + "/fifo.p8"]).flatMap { ["--set", $0] },
                environment: ["TOKENKEEPER_DATABASE_URL": "postgresql://u@127.0.0.1:1/none"])
            #expect(
                (run.output + run.errors).contains("\(folder)/fifo.p8 cannot be read: not a regular file"), "\(run)")
        }

        // As systemd passes it: LoadCredential=apns:/etc/tokenkeeperd/apns.
        try FileManager.default.copyItem(atPath: files.signingKeyFile, toPath: folder + "/apns_AuthKey_X.p8")
        let handedOver = try checkConfig(
            flags(["key_file": "AuthKey_X.p8"]), environment: ["CREDENTIALS_DIRECTORY": folder])
        #expect(handedOver.status == 0 && handedOver.errors == "", "\(handedOver.errors)")

        let wrong = try checkConfig(
            [
                "certificate_file=\(files.clientCertificate("wrong", topic: "u").certificate)",
                "certificate_key_file=\(files.folder)/wrong.key", "topics=t",
            ]
            .map { "credential.old.\($0)" })
        #expect(
            wrong.status == 78 && wrong.errors.contains("the certificate is for u, and not for the topic t"),
            "\(wrong.errors)")

        // An expired certificate is reported, and stops nothing.
        let old = try files.clientCertificate("old-\(UUID().uuidString.prefix(8))", topic: "t", days: -1)
        let expired = try checkConfig(
            ["certificate_file=\(old.certificate)", "certificate_key_file=\(old.key)", "topics=t"].map {
                "credential.old.\($0)"
            })
        #expect(
            expired.status == 0 && expired.output.contains("# credential old: certificate for t, expires"),
            "\(expired.errors)")
    }
}
