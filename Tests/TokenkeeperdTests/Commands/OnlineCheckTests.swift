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

    @Test func `each connection gets a line, and APNs gets no request`() throws {
        let stage = try SendingStage()
        let identity = try stage.files.clientCertificate(
            "online-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 300)
        let fine = try check(stage, stage.key + certificate(identity))
        let place = "localhost:\(stage.apns.port)"
        #expect(fine.status == 0 && fine.errors.isEmpty, "\(fine)")
        #expect(
            fine.output.split(separator: "\n").filter { $0.hasSuffix(": works") } == [
                "# PostgreSQL: works", "# APNs production, \(place): works", "# APNs sandbox, \(place): works",
                "# APNs production, with the certificate of credential old, \(place): works",
                "# APNs sandbox, with the certificate of credential old, \(place): works",
            ])
        #expect(stage.apns.records.connections == 4)
        #expect(stage.apns.records.seen == 0 && stage.apns.records.refused == 0 && stage.apns.records.faults.isEmpty)
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
        #expect(lines.first?.contains("APNs production, localhost:\(stage.apns.port): ") == true)
        #expect(lines.first?.contains("certificate") == true)
        #expect(lines.last?.contains("APNs sandbox, localhost:\(nobody): ") == true)

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
        let stage = try SendingStage()
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
            refused.errors.contains("APNs production, with the certificate of credential old, localhost:\(port): ")
                && refused.errors.contains("alert"), "\(refused.errors)")
        #expect(refused.output.contains("# APNs sandbox, with the certificate of credential old"))
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
