import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `The configuration, checked online` {
    private func check(_ stage: SendingStage, _ settings: [String], online: Bool = true) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "check-config"] + (online ? ["--online"] : [])
                + (stage.servers + settings).flatMap { ["--set", $0] },
            environment: ["TOKENKEEPER_DATABASE_URL": stage.database.url()])
    }

    private func certificate(_ identity: TestAuthority.Identity) -> [String] {
        [
            "credential.old.certificate_file=\(identity.certificate)",
            "credential.old.certificate_key_file=\(identity.key)",
            "credential.old.topics=com.example.app",
        ]
    }

    @Test func `a key that APNs refuses is found, and a topic that it refuses is none of its faults`() throws {
        let stage = try SendingStage { $0.signingKeys = [] }
        let refused = try check(stage, stage.key)
        #expect(refused.status == 69, "\(refused)")
        #expect(
            refused.errors.contains(
                "APNs production, credential main: APNs answered 403 InvalidProviderToken; usually key_id and team_id"),
            "\(refused.errors)")
        let other = try SendingStage { _ in
        } answer: { _ in
            .refused(400, "TopicDisallowed")
        }
        #expect(try check(other, other.key).status == 0)
    }

    @Test func `each topic is tried with its push type, and the one that APNs refuses is named`() throws {
        let stage = try SendingStage { _ in
        } answer: { request in
            request.topic == "com.example.other" ? .refused(400, "TopicDisallowed") : nil
        }
        let topics = ["com.example.app", "com.example.app.voip", "com.example.other", "com.example.wild.*"]
        let checked = try check(stage, stage.key + ["credential.main.topics=\(topics.joined(separator: " "))"])
        #expect(checked.status == 69, "\(checked)")
        #expect(
            checked.errors.contains(
                "APNs production, credential main: topic com.example.other: APNs answered 400 TopicDisallowed; the key or certificate is for"
            ),
            "\(checked.errors)")
        let requests = stage.apns.records.exchanges.map(\.request)
        #expect(
            Set(requests.map { "\($0.topic ?? "") \($0.pushType ?? "")" }) == [
                "com.example.app alert", "com.example.app.voip voip", "com.example.other alert",
            ])
    }

    @Test func `a key_id that its file contradicts is named`() throws {
        let stage = try SendingStage()
        let exchanged = try check(
            stage,
            stage.key + [
                "credential.main.key_id=\(stage.files.signingKey.team)",
                "credential.main.team_id=\(stage.files.signingKey.id)",
            ],
            online: false)
        #expect(exchanged.status == 0)
        #expect(
            exchanged.errors.contains(
                "warning: credential.main: key_id is TEAM123456, and its file says FAKE123456; key_id and team_id are exchanged"
            ),
            "\(exchanged.errors)")
    }

    @Test func `each credential gets a line, and no device gets a push`() throws {
        let stage = try SendingStage { $0.clientAuthority = try SendingStage.authority.get().certificate }
        let identity = try stage.files.clientCertificate(
            "online-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 300)
        let fine = try check(stage, stage.key + certificate(identity))
        #expect(fine.status == 0 && fine.errors.isEmpty, "\(fine)")
        #expect(
            fine.output.split(separator: "\n").filter { $0.hasSuffix(": works") } == [
                "# PostgreSQL: works", "# APNs production, credential main: works",
                "# APNs sandbox, credential main: works",
                "# APNs production, credential old: works", "# APNs sandbox, credential old: works",
            ])
        let requests = stage.apns.records.exchanges.map(\.request)
        #expect(requests.count == 4 && requests.allSatisfy { $0.token == String(repeating: "0", count: 64) })
    }

    @Test func `what fails is named, and the rest is still tried`() throws {
        let stage = try SendingStage()
        let stranger = try TestAuthority()
        let nobody = try TestCluster.freePort()
        let failed = try check(
            stage,
            stage.key + ["send.ca_file=\(stranger.certificate)", "send.sandbox_server=localhost:\(nobody)"])
        #expect(failed.status == 69 && failed.output.contains("# PostgreSQL: works"), "\(failed)")
        let lines = failed.errors.split(separator: "\n")
        #expect(lines.count == 2, "\(failed.errors)")
        #expect(lines.first?.contains("APNs production, credential main: ") == true)
        #expect(lines.first?.contains("certificate") == true)
        #expect(lines.last?.contains("APNs sandbox, credential main: ") == true)

        let proxied = try check(stage, stage.key + ["send.proxy=http://127.0.0.1:\(nobody)"])
        #expect(
            proxied.status == 69 && proxied.errors.contains("through the proxy http://127.0.0.1:\(nobody)"),
            "\(proxied)")

        let away = try ProgramRun(
            [DaemonProcess.program, "check-config", "--online"],
            environment: ["TOKENKEEPER_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/db"])
        #expect(away.status == 69 && away.errors.contains("PostgreSQL: ") && !away.errors.contains("hunter2"))
    }

    /// With TLS 1.3, the server looks at the client's certificate only after the client's side of the handshake is done.
    @Test func `a certificate that the server refuses is found`() throws {
        let stage = try SendingStage { $0.clientAuthority = try SendingStage.authority.get().certificate }
        let stranger = try TestAuthority()
        let port = try TestCluster.freePort()
        let server = Process()
        server.executableURL = URL(fileURLWithPath: "/usr/bin/openssl")
        server.arguments = [
            "s_server", "-accept", "\(port)", "-cert", stage.files.server.certificate, "-key", stage.files.server.key,
            "-CAfile", stranger.certificate, "-Verify", "1", "-verify_return_error", "-alpn", "h2", "-tls1_3", "-quiet",
        ]
        server.standardInput = Pipe()
        server.standardOutput = FileHandle.nullDevice
        server.standardError = FileHandle.nullDevice
        try server.run()
        defer {
            // The tests block SIGTERM, and so do their children.
            kill(server.processIdentifier, SIGKILL)
            server.waitUntilExit()
        }
        let identity = try stage.files.clientCertificate(
            "refused-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 300)
        var refused = try check(stage, ["send.production_server=localhost:\(port)"] + certificate(identity))
        try eventually("the server listens") {
            if !refused.errors.contains("connect to localhost") { return true }
            refused = try check(stage, ["send.production_server=localhost:\(port)"] + certificate(identity))
            return false
        }
        #expect(refused.status == 69, "\(refused)")
        #expect(
            refused.errors.contains("APNs production, credential old: ")
                && refused.errors.contains("alert"), "\(refused.errors)")
        #expect(refused.output.contains("# APNs sandbox, credential old"))
    }

    @Test func `a missing or empty file of trusted certificates is found offline`() throws {
        let stage = try SendingStage()
        let missing = try check(stage, stage.key + ["send.ca_file=/nonexistent.pem"], online: false)
        #expect(
            missing.status == 78
                && missing.errors.contains("/nonexistent.pem, cannot be read: No such file or directory"), "\(missing)")
        let directory = try TemporaryDirectory()
        let file = try directory.write("", to: "empty.pem")
        let empty = try check(stage, stage.key + ["send.ca_file=\(file)"], online: false)
        #expect(empty.status == 78 && empty.errors.contains("contain no certificate"), "\(empty)")
        #expect(try check(stage, ["send.ca_file=/nonexistent.pem"], online: false).status == 0, "it does not send")
    }
}
