import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `Broadcast channels` {
    private func run(_ stage: SendingStage, _ arguments: [String], settings: [String]? = nil, input: String? = nil)
        throws -> ProgramRun
    {
        try ProgramRun(
            [DaemonProcess.program, "channel"] + arguments.prefix(1)
                + (stage.servers + (settings ?? stage.key)).flatMap { ["--set", $0] } + arguments.dropFirst(),
            input: input,
            environment: ["TOKENKEEPER_DATABASE_URL": stage.database.url()])
    }

    @Test func `a channel is created, listed, shown, sent to and deleted`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let app = ["--app", "com.example.app"]
        let created = try run(stage, ["create"] + app)
        #expect(created.status == 0, "\(created)")
        let channel = created.output.trimmingCharacters(in: .newlines)
        let keeping = try run(stage, ["create", "--keep-latest"] + app).output.trimmingCharacters(in: .newlines)
        #expect(try run(stage, ["list"] + app).output == "\(channel)\n\(keeping)\n")
        #expect(try run(stage, ["show", channel] + app).output == "keeps no push\n")
        #expect(try run(stage, ["show", keeping] + app).output == "keeps the latest push\n")
        let payload = #"{"aps":{"timestamp":1,"event":"update","content-state":{}}}"#
        let sent = try run(stage, ["send", channel, payload] + app)
        #expect(sent.status == 0 && sent.output.hasPrefix("accepted as "), "\(sent)")
        #expect(try run(stage, ["send", keeping, "-", "--keep-for", "1h"] + app, input: payload).status == 0)
        let pushes = stage.apns.records.exchanges.map(\.request).filter { $0.pushType == "liveactivity" }
        #expect(pushes.count == 2 && pushes.allSatisfy { $0.payload == Array(payload.utf8) && $0.priority == "10" })
        #expect(pushes.map(\.expiration).filter { $0 == "0" }.count == 1)
        #expect(
            Set(stage.apns.records.exchanges.compactMap(\.request.providerToken)).count == 1, "by way of the database")
        #expect(try run(stage, ["delete", channel] + app).output == "deleted\n")
        #expect(try run(stage, ["list"] + app).output == "\(keeping)\n")
        #expect(try run(stage, ["list", "--app", "com.example.other"]).output == "")
        #expect(
            try run(stage, ["list", "--environment", "sandbox"] + app).output == "\(keeping)\n",
            "one fake is both servers")
    }

    @Test func `what does not work is said`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let app = ["--app", "com.example.app"]
        let unknown = try run(stage, ["show", "AAAA"] + app)
        #expect(unknown.status == 69 && unknown.errors.contains("APNs answered 404 ChannelNotRegistered"), "\(unknown)")
        let none = try run(stage, ["list", "--app", "org.example.app"])
        #expect(
            none.status == 78 && none.errors.contains("no credential is configured for org.example.app (production)"),
            "\(none)")
        let text = try run(stage, ["send", "AAAA", "no JSON"] + app)
        #expect(text.status == 64 && text.errors.contains("the payload is not a JSON object"), "\(text)")
        for name in ["com.example.a/../x", "com.example.app#", "com.example.app.push-type.liveactivity", ""] {
            let wrong = try run(stage, ["list", "--app", name])
            #expect(wrong.status == 64 && wrong.errors.contains("--app is no bundle identifier"), "\(wrong)")
        }
        let header = try run(stage, ["delete", "a\r\nauthorization: x"] + app)
        #expect(header.status == 69 && header.errors.contains("a character that a header cannot have"), "\(header)")
        let nobody = try TestCluster.freePort()
        let away = try run(stage, ["list"] + app + ["--set", "send.production_server=localhost:\(nobody)"])
        #expect(away.status == 69 && away.errors.contains("localhost:\(nobody)"), "\(away)")
        let key = try SendingStage { $0.signingKeys = [] }
        defer { key.apns.stop() }
        let refused = try run(key, ["list"] + app)
        #expect(
            refused.status == 69 && refused.errors.contains("403 InvalidProviderToken; usually key_id and team_id"),
            "\(refused)")
    }

    @Test func `a channel is managed with a certificate, too`() throws {
        let stage = try SendingStage { $0.clientAuthority = try SendingStage.authority.get().certificate }
        defer { stage.apns.stop() }
        let identity = try stage.files.clientCertificate(
            "channel-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 300)
        let settings = [
            "credential.old.certificate_file=\(identity.certificate)",
            "credential.old.certificate_key_file=\(identity.key)",
            "credential.old.topics=com.example.app",
        ]
        let created = try run(stage, ["create", "--app", "com.example.app"], settings: settings)
        #expect(created.status == 0 && !created.output.isEmpty, "\(created)")
    }
}
