import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// One line of `clients/shard-vectors.json`.
private struct Vector: Decodable {
    let token: String?
    /// By the number of shards.
    let shards: [String: Int]

    static func all() throws -> [Vector] {
        let file = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
            .appendingPathComponent("../../../clients/shard-vectors.json")
        return try JSONDecoder().decode([Vector].self, from: Data(contentsOf: file))
    }
}

@Suite(.ownThread) struct `The shard of a token` {
    @Test func `is the same in Swift, SQL and Python`() throws {
        let vectors = try Vector.all()
        let database = try TestCluster.shared.database()
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../../..").path
        // A database that is no shard.
        let other = try TestCluster.shared.database(migrated: false)
        try other.psql(
            String(contentsOfFile: "\(root)/clients/sql/tokenkeeper_shards.sql", encoding: .utf8), user: "postgres")
        // Some tokens are of each shard of four, or the file proves little.
        #expect(Set(vectors.compactMap { $0.shards["4"] }).count == 4)
        for vector in vectors {
            let token = vector.token.flatMap { DeviceToken(hex: $0) }
            for (shards, expected) in vector.shards {
                let count = try #require(Int(shards).flatMap { ShardCount($0) })
                #expect(token?.shard(of: count) ?? 0 == expected, "\(vector)")
            }
            let text = vector.token.map { SQLLiteral.quoted($0) } ?? "NULL"
            let pairs = vector.shards.map { "(\($0), \($1))" }.joined(separator: ", ")
            func different(_ function: String) -> String {
                "SELECT count(*) FROM (VALUES \(pairs)) AS v (shards, n) WHERE \(function)(\(text), v.shards) IS DISTINCT FROM v.n"
            }
            #expect(try database.psql(different("tokenkeeper.shard_of"), user: "a_app") == "0", "\(vector)")
            #expect(try other.psql(different("public.shard_of"), user: "postgres") == "0", "\(vector)")
        }
        #expect(throws: TestFailure.self) { try other.psql("SELECT public.shard_of('aa', 3)", user: "postgres") }
        let run = try ProgramRun(
            ["python3", "-B", "\(root)/Tests/clients/test_shards.py"],
            environment: ["PYTHONPATH": "\(root)/clients/python"])
        #expect(run.status == 0 && run.errors.contains("Ran 4 tests"), "\(run.errors)")
    }

    @Test func `is asked for a power of two from 1 to 1024`() throws {
        let database = try TestCluster.shared.database()
        for shards in ["0", "3", "-4", "2048", "-2147483648", "NULL"] {
            #expect(throws: TestFailure.self) {
                try database.psql("SELECT tokenkeeper.shard_of('aa', \(shards))", user: "a_sender")
            }
            #expect(Int(shards).flatMap { ShardCount($0) } == nil)
        }
        for role in ["sender", "app", "reader", "operator", "daemon"] {
            #expect(try database.psql("SELECT tokenkeeper.shard_of('AA', 1024)", user: "a_\(role)") == "597")
        }
    }

    @Test func `is kept by a partition key, and never computed for another collation or search path`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            CREATE TABLE public.queue (token text) PARTITION BY LIST (tokenkeeper.shard_of(token, 2));
            CREATE TABLE public.queue_0 PARTITION OF public.queue FOR VALUES IN (0);
            CREATE TABLE public.queue_1 PARTITION OF public.queue FOR VALUES IN (1);
            INSERT INTO public.queue VALUES ('aa'), ('AA'), ('zz'), (NULL)
            """, user: "postgres")
        #expect(try database.psql("SELECT count(*) FROM public.queue_1", user: "postgres") == "2")
        #expect(try database.psql("SELECT count(*) FROM public.queue_0", user: "postgres") == "2")
    }

    @Test func `a database is one shard or none`() throws {
        let database = try TestCluster.shared.database()
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.shard") == "0")
        for (number, shards) in [(0, 3), (4, 4), (-1, 4), (0, 2048), (0, 0)] {
            #expect(throws: TestFailure.self) {
                try database.psql("INSERT INTO tokenkeeper.shard VALUES (\(number), \(shards))")
            }
        }
        try database.psql("INSERT INTO tokenkeeper.shard VALUES (3, 4)")
        #expect(throws: TestFailure.self) { try database.psql("INSERT INTO tokenkeeper.shard VALUES (2, 4)") }
        #expect(try database.psql("SELECT number, shards FROM tokenkeeper.shard", user: "a_daemon") == "3|4")
    }
}
