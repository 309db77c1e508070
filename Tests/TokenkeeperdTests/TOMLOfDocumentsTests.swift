import Foundation
import Testing
import TokenLedger

@testable import tokenkeeperd

/// The `toml` blocks of the documents, given to the readers of the configuration and of the shard map. The files that a block names need not exist.
@Suite struct `TOML blocks of documents` {
    private struct Block {
        /// The file and the number of the block in it.
        let place: String
        let text: String

        var isShardMap: Bool { text.contains(#/(?m)^shards = \[/#) }

        static func all(in text: String, of path: String) -> [Block] {
            text.matches(of: #/(?m)^( *)```toml\n((?s).*?)\n *```$/#).enumerated().map { number, found in
                let lines = found.output.2.split(separator: "\n", omittingEmptySubsequences: false)
                return Block(
                    place: "\(path), block \(number + 1)",
                    text: lines.map { $0.dropFirst($0.hasPrefix(found.output.1) ? found.output.1.count : 0) }
                        .joined(separator: "\n") + "\n")
            }
        }

        /// What is wrong with it; empty if it is valid.
        func problems(in folder: TemporaryDirectory) throws -> [String] {
            do {
                if isShardMap {
                    _ = try ShardMap(file: folder.write(text, to: "shards.toml"))
                } else {
                    _ = try Configuration(
                        files: [ConfigurationText(contents: Array(text.utf8), name: place)], environment: [:],
                        flags: [])
                }
                return []
            } catch let error as ConfigurationError {
                return error.problems
            }
        }
    }

    @Test func `each is a configuration, or a shard map, without any problem`() throws {
        let root = PackagedProgram.repository
        let docs = try #require(FileManager.default.enumerator(atPath: root.appendingPathComponent("docs").path))
        let pages =
            ["README.md"] + docs.compactMap { $0 as? String }.filter { $0.hasSuffix(".md") }.map { "docs/\($0)" }
        let blocks = try pages.flatMap { path in
            try Block.all(
                in: String(contentsOf: root.appendingPathComponent(path), encoding: .utf8), of: path)
        }
        #expect(blocks.count { $0.isShardMap } == 2, "the map of shard.md, and that of move-a-shard.md")
        #expect(blocks.count { !$0.isShardMap } > 8, "the pattern finds them")
        let folder = try TemporaryDirectory()
        for block in blocks {
            let problems = try block.problems(in: folder)
            #expect(problems == [], "\(block.place): \(problems)")
        }
    }

    @Test func `a wrong one is noticed`() throws {
        let page = """
            1. Write this:

               ```toml
               [database]
               url = "postgresql:///push"

               [metrics]
               listen = "somewhere"
               ```

            ```toml
            # A map.
            shards = ["dbname=a", "dbname=b", "dbname=c"]
            ```
            ```toml
            database_url = "postgresql:///push"
            ```
            """
        let folder = try TemporaryDirectory()
        let blocks = Block.all(in: page, of: "a.md")
        #expect(blocks.map(\.isShardMap) == [false, true, false])
        let problems = try blocks.map { try $0.problems(in: folder) }
        #expect(problems[0].count == 2 && problems[2] == [])
        #expect(problems[0].first == "a.md, block 1:2: unknown setting database.url", "\(problems)")
        #expect(problems[0].last?.hasPrefix("a.md, block 1:5: metrics.listen is \"somewhere\", expected ") == true)
        #expect(problems[1].first?.contains("it has 3 shards, expected a power of two") == true, "\(problems)")
    }
}
