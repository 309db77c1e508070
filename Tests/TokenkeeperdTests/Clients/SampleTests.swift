import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// The samples of docs/how-to/use-from-your-language.md, with drivers from Debian and PyPI, which `scripts/setup clients` gets.
@Suite(.ownThread) struct `Samples in other languages` {
    private static let root = PackagedProgram.repository.path

    struct Sample: CustomTestStringConvertible, Sendable {
        let language: String
        let file: String
        let command: [String]
        var environment: [String: String] = [:]
        var testDescription: String { language }
    }

    static let samples = [
        Sample(language: "python", file: "sample.py", command: ["\(root)/.build/python/bin/python", "-B"]),
        Sample(
            language: "js", file: "sample.js", command: ["node"],
            environment: ["NODE_PATH": "/usr/share/nodejs:\(root)/.build/servers/usr/share/nodejs"]),
        Sample(
            language: "go", file: "sample.go", command: ["go", "run"],
            environment: ["GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": "\(root)/.build/go"]),
        Sample(language: "ruby", file: "sample.rb", command: ["ruby"]),
    ]

    @Test(arguments: samples)
    func `a sample does what the page says`(sample: Sample) throws {
        let blocks = try PrintedBlock.all(ofPage: "docs/how-to/use-from-your-language.md").filter {
            $0.language == sample.language
        }
        let block = try #require(blocks.first)
        #expect(blocks.count == 1)
        let database = try TestCluster.shared.database()
        let login = "sample_\(sample.language)_\(database.name)"
        try database.psql("CREATE ROLE \(login) LOGIN IN ROLE tokenkeeper_app, tokenkeeper_sender", user: "postgres")
        let daemon = try database.daemon(["drain.poll_idle=100ms"])
        let folder = try TemporaryDirectory()
        let file = "\(folder.path)/\(sample.file)"
        try block.text.write(toFile: file, atomically: true, encoding: .utf8)
        let run = try ProgramRun(
            ["timeout", "240"] + sample.command + [file],
            environment: sample.environment.merging([
                "PGHOST": database.cluster.folder, "PGPORT": "\(database.cluster.port)", "PGUSER": login,
                "PGDATABASE": database.name,
            ]) { $1 })
        #expect(run.status == 0, "\(run)")
        #expect(run.output.contains("a1b2c3d4e5f60718") && !run.output.contains("b2c3d4e5f6071829"), "\(run)")
        try eventually("the response and the queued registrations are applied") {
            try database.psql("SELECT string_agg(token || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token")
                == "a1b2c3d4e5f60718 stale, b2c3d4e5f6071829 unregistered_by_app, c3d4e5f60718293a active, d4e5f60718293a4b active"
        }
        #expect(
            try database.psql(
                "SELECT string_agg(device_id, ' ' ORDER BY token), (SELECT count(*) FROM tokenkeeper.rejected_result) FROM tokenkeeper.token"
            ) == "device-1 device-2 device-3|0")
        #expect(daemon.stop() == 0)
        try database.psql("DROP ROLE \(login)", user: "postgres")
    }

    @Test func `each language of the page has its sample`() throws {
        let languages = try PrintedBlock.all(ofPage: "docs/how-to/use-from-your-language.md").map(\.language)
        #expect(languages == Self.samples.map(\.language))
    }
}
