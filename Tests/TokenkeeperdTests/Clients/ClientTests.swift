import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// The clients in `clients/`, with the real libraries from PyPI, a daemon and the fake APNs. `scripts/python-for-tests` gets the libraries.
@Suite(.ownThread) struct `Clients in Python` {
    private static let root = PackagedProgram.repository.path

    @Test(arguments: [
        ("test_tokenkeeper", ""), ("test_aioapns", ""), ("test_aioapns", "aioapns-4"), ("test_django", ""),
    ])
    func `a client does what its docstrings say`(test: String, libraries: String) throws {
        let stage = try SendingStage {
            $0.provesFirst = test == "test_aioapns"
        } answer: { request in
            let token = request.token ?? ""
            if token.hasPrefix("dead") { return .stale(at: request.time) }
            if token.hasPrefix("bad") { return .refused(400, "BadDeviceToken") }
            return token.hasPrefix("fff") ? .never : nil
        }
        let provider = "provider_\(stage.database.name)"
        try stage.database.psql(
            "CREATE ROLE \(provider) LOGIN IN ROLE tokenkeeper_app, tokenkeeper_sender", user: "postgres")
        try stage.database.psql("GRANT CREATE ON SCHEMA public TO \(provider)", user: "postgres")
        let daemon = try stage.database.daemon(["guard.max_share=100%", "drain.poll_idle=100ms"])
        let folders = [
            "\(Self.root)/.build/python/\(libraries)", "\(Self.root)/clients/python", "\(Self.root)/clients/django",
        ]
        let run = try ProgramRun(
            [
                "timeout", "240", "\(Self.root)/.build/python/bin/python", "-B",
                "\(Self.root)/Tests/clients/\(test).py", "-v",
            ],
            environment: [
                "PYTHONPATH": folders.dropFirst(libraries.isEmpty ? 1 : 0).joined(separator: ":"),
                "PROVIDER_URL": stage.database.url(user: provider), "OWNER_URL": stage.database.url(user: "owner"),
                "APNS_PORT": "\(stage.apns.port)", "APNS_CA": stage.files.certificate,
                "SSL_CERT_FILE": stage.files.certificate,
                "APNS_KEY": stage.files.signingKeyFile, "APNS_KEY_ID": stage.files.signingKey.id,
                "APNS_TEAM_ID": stage.files.signingKey.team,
            ])
        #expect(run.status == 0, "\(run.output)\(run.errors)\(daemon.logged)")
        let script = try String(contentsOfFile: "\(Self.root)/Tests/clients/\(test).py", encoding: .utf8)
        #expect(run.errors.contains("Ran \(script.matches(of: #/ def test_/#).count) tests in"), "\(run.errors)")
        #expect(libraries.isEmpty || run.output.contains("aioapns 4"), "\(run.output)")
    }

    @Test func `each client is one file of at most 150 lines`() throws {
        let folder = PackagedProgram.repository.appendingPathComponent("clients")
        let files = try #require(FileManager.default.enumerator(atPath: folder.path)).compactMap { $0 as? String }
            .filter { $0.hasSuffix(".py") && !$0.hasPrefix("convert/") }
        #expect(files.count == 4, "\(files)")
        for file in files {
            let text = try String(contentsOf: folder.appendingPathComponent(file), encoding: .utf8)
            #expect(text.split(separator: "\n", omittingEmptySubsequences: false).count <= 151, "\(file)")
        }
    }
}
