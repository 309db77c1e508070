import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// The clients in `clients/`, with the real libraries from PyPI, a daemon and the fake APNs. `scripts/python-for-tests` gets the libraries.
@Suite(.ownThread) struct `Clients in Python` {
    private static let root = PackagedProgram.repository.path

    @Test(arguments: [
        ("test_tokenkeeper", ""), ("test_aioapns", ""), ("test_aioapns", "aioapns-4"), ("test_django", ""),
    ])
    func `a client does what its docstrings say`(test: String, libraries: String) throws {
        let stage = try Self.stage(test)
        let provider = "provider_\(stage.database.name)"
        try stage.database.psql(
            "CREATE ROLE \(provider) LOGIN IN ROLE tokenkeeper_app, tokenkeeper_sender", user: "postgres")
        try stage.database.psql("GRANT CREATE ON SCHEMA public TO \(provider)", user: "postgres")
        let daemon = try stage.database.daemon(Self.settings)
        let run = try Self.run(
            test, libraries, stage, provider: stage.database.url(user: provider),
            owner: stage.database.url(user: "owner"))
        #expect(run.status == 0, "\(run.output)\(run.errors)\(daemon.logged)")
        #expect(try run.errors.contains("Ran \(Self.count(test)) tests in"), "\(run.errors)")
        #expect(libraries.isEmpty || run.output.contains("aioapns 4"), "\(run.output)")
    }

    /// The same scripts, which know nothing of shards.
    @Test(arguments: ["test_tokenkeeper", "test_aioapns", "test_django"])
    func `a client works unchanged through a router`(test: String) throws {
        let stage = try Self.stage(test)
        let cluster = try TestCluster.prepared()
        let shards = try (0..<2).map { _ in try cluster.database() }
        let router = try cluster.database(migrated: false)
        try router.psql(
            "CREATE ROLE provider LOGIN IN ROLE tokenkeeper_app, tokenkeeper_sender", user: "postgres")
        try router.psql("GRANT CREATE ON SCHEMA public TO provider", user: "postgres")
        var admin = try router.connect(user: "postgres")
        let release = Version(major: 0, minor: 1, patch: 0)
        #expect(
            try Router(to: ShardMap(shards.map(TestShards.connection)), shardUser: "owner", daemon: release).migrate(
                &admin))
        let folder = try TemporaryDirectory()
        let map = try folder.write(TestShards.mapText(shards), to: "shards.toml")
        let daemons = try shards.map { try $0.daemon(Self.settings + ["shards.map=\(map)"]) }
        let run = try Self.run(
            test, "", stage, provider: router.url(user: "provider"), owner: router.url(user: "a_reader"))
        #expect(run.status == 0, "\(run.output)\(run.errors)\(daemons.map(\.logged))")
        #expect(try run.errors.contains("Ran \(Self.count(test)) tests in"), "\(run.errors)")
        for shard in shards {
            #expect(
                try shard.psql("SELECT count(*) > 3 FROM tokenkeeper.ledger") == "t", "it has its part of the tokens")
        }
    }

    private static let settings = ["guard.max_share=100%", "drain.poll_idle=100ms"]

    /// A fake APNs that answers by how a token begins, as Tests/clients/stage.py says.
    private static func stage(_ test: String) throws -> SendingStage {
        try SendingStage {
            $0.provesFirst = test == "test_aioapns"
        } answer: { request in
            let token = request.token ?? ""
            if token.hasPrefix("dead") { return .stale(at: request.time) }
            if token.hasPrefix("bad") { return .refused(400, "BadDeviceToken") }
            return token.hasPrefix("fff") ? .never : nil
        }
    }

    /// How many tests a script has.
    private static func count(_ test: String) throws -> Int {
        try String(contentsOfFile: "\(root)/Tests/clients/\(test).py", encoding: .utf8)
            .matches(of: #/ def test_/#).count
    }

    /// Runs a script.
    private static func run(
        _ test: String, _ libraries: String, _ stage: SendingStage, provider: String, owner: String
    ) throws -> ProgramRun {
        let folders = ["\(root)/.build/python/\(libraries)", "\(root)/clients/python", "\(root)/clients/django"]
        return try ProgramRun(
            ["timeout", "240", "\(root)/.build/python/bin/python", "-B", "\(root)/Tests/clients/\(test).py", "-v"],
            environment: [
                "PYTHONPATH": folders.dropFirst(libraries.isEmpty ? 1 : 0).joined(separator: ":"),
                "PROVIDER_URL": provider, "OWNER_URL": owner,
                "APNS_PORT": "\(stage.apns.port)", "APNS_CA": stage.files.certificate,
                "SSL_CERT_FILE": stage.files.certificate,
                "APNS_KEY": stage.files.signingKeyFile, "APNS_KEY_ID": stage.files.signingKey.id,
                "APNS_TEAM_ID": stage.files.signingKey.team,
            ])
    }

    @Test func `each client is one file of at most 150 lines`() throws {
        let folder = PackagedProgram.repository.appendingPathComponent("clients")
        let files = try #require(FileManager.default.enumerator(atPath: folder.path)).compactMap { $0 as? String }
            .filter { $0.hasSuffix(".py") }
        #expect(files.count == 4, "\(files)")
        for file in files {
            let text = try String(contentsOf: folder.appendingPathComponent(file), encoding: .utf8)
            #expect(text.split(separator: "\n", omittingEmptySubsequences: false).count <= 151, "\(file)")
        }
    }
}
