import Foundation
import Testing

@testable import tokenkeeperd

/// The `toml` blocks of the documents, given to the reader of the configuration. The files that a block names need not exist.
@Suite struct `TOML blocks of documents` {
    private struct Block {
        /// The file and the number of the block in it.
        let place: String
        let text: String

        static func all(in text: String, of path: String) -> [Block] {
            PrintedBlock.all(in: text).filter { $0.language == "toml" }.enumerated().map { number, found in
                Block(place: "\(path), block \(number + 1)", text: found.text + "\n")
            }
        }

        /// What is wrong with it; empty if it is valid.
        func problems() -> [String] {
            do throws(ConfigurationError) {
                _ = try Configuration(
                    files: [ConfigurationText(contents: Array(text.utf8), name: place)], environment: [:], flags: [])
                return []
            } catch {
                return error.problems
            }
        }
    }

    @Test func `each is a configuration without any problem`() throws {
        let root = PackagedProgram.repository
        let docs = try #require(FileManager.default.enumerator(atPath: root.appendingPathComponent("docs").path))
        let pages =
            ["README.md"] + docs.compactMap { $0 as? String }.filter { $0.hasSuffix(".md") }.map { "docs/\($0)" }
        let blocks = try pages.flatMap { path in
            try Block.all(
                in: String(contentsOf: root.appendingPathComponent(path), encoding: .utf8), of: path)
        }
        #expect(blocks.count > 6, "the pattern finds them")
        for block in blocks {
            let problems = block.problems()
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
            database_url = "postgresql:///push"
            ```
            """
        let blocks = Block.all(in: page, of: "a.md")
        try #require(blocks.count == 2)
        let problems = blocks.map { $0.problems() }
        #expect(problems[0].count == 2 && problems[1] == [])
        #expect(problems[0].first == "a.md, block 1:2: unknown setting database.url", "\(problems)")
        #expect(problems[0].last?.hasPrefix("a.md, block 1:5: metrics.listen is \"somewhere\", expected ") == true)
    }
}
