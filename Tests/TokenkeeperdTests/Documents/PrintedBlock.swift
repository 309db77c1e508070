import Foundation

/// A block of a document, between two lines of three backticks.
struct PrintedBlock: Equatable {
    /// Empty if the document names none.
    let language: String
    /// Without the indentation of the block.
    let text: String

    static func all(in page: String) -> [PrintedBlock] {
        var blocks: [PrintedBlock] = []
        var open: (language: String, indentation: Int, lines: [Substring])?
        for line in page.split(separator: "\n", omittingEmptySubsequences: false) {
            let content = line.drop { $0 == " " }
            if let block = open {
                if content.hasPrefix("```") {
                    blocks.append(
                        PrintedBlock(language: block.language, text: block.lines.joined(separator: "\n")))
                    open = nil
                } else {
                    open?.lines.append(line.dropFirst(min(block.indentation, line.count - content.count)))
                }
            } else if content.hasPrefix("```") {
                open = (String(content.dropFirst(3)), line.count - content.count, [])
            }
        }
        return blocks
    }

    /// The blocks of a file of this repository.
    static func all(ofPage path: String) throws -> [PrintedBlock] {
        all(in: try String(contentsOf: PackagedProgram.repository.appendingPathComponent(path), encoding: .utf8))
    }

    /// What the text between the blocks of a file has in backticks.
    static func inline(ofPage path: String) throws -> [String] {
        let page = try String(contentsOf: PackagedProgram.repository.appendingPathComponent(path), encoding: .utf8)
        return page.replacing(#/(?m)^ *```(?s:.*?)\n *```$/#, with: "").matches(of: #/`([^`\n]+)`/#).map {
            $0.output.1.replacing(#"\|"#, with: "|").description
        }
    }
}
