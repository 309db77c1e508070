import Foundation
import Testing

/// Every relative link in the documents leads to a file, and to a heading if it names one.
@Suite struct `Links in documents` {
    @Test func `every relative link and anchor resolves`() throws {
        let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../..")
            .standardized
        let documents = try Document.all(below: root)
        #expect(documents.contains { $0.path == "README.md" } && documents.count > 10, "the search finds them")
        let links = documents.reduce(0) { $0 + $1.links.count }
        #expect(links > 50, "the pattern finds them")
        for document in documents {
            for link in document.links {
                let fault = document.fault(of: link, among: documents, root: root)
                #expect(fault == nil, "\(document.path): \(link): \(fault ?? "")")
            }
        }
    }

    @Test func `each alert leads to its section of the runbooks`() throws {
        let root = PackagedProgram.repository
        let links = try PackagedProgram.monitoring("alerts.yml").matches(of: #/runbook_url: (\S+)/#).map {
            String($0.output.1)
        }
        #expect(links.count == 21 && links.allSatisfy { $0.hasPrefix("docs/how-to/incidents.md#") })
        let documents = try Document.all(below: root)
        let readme = try #require(documents.first { $0.path == "README.md" }, "the paths begin where it is")
        for link in links { #expect(readme.fault(of: link, among: documents, root: root) == nil, "\(link)") }
    }

    @Test func `a broken link is noticed`() {
        let page = Document(
            path: "docs/a.md",
            text: """
                # A page
                ## `make run`, and what it does
                ## Twice
                ## Twice
                See [b](b.md#one-two), [no file](c.md), [here](#make-run-and-what-it-does), [again](#twice-1), [no heading](#x)
                and [elsewhere](https://example.com/c.md). `[code](no.md)`
                ```sh
                # [code](no.md)
                ```
                """)
        let other = Document(path: "docs/b.md", text: "## One *two*!\n")
        #expect(page.links == ["b.md#one-two", "c.md", "#make-run-and-what-it-does", "#twice-1", "#x"])
        #expect(page.anchors == ["a-page", "make-run-and-what-it-does", "twice", "twice-1"])
        let faults = page.links.map {
            page.fault(of: $0, among: [page, other], root: URL(fileURLWithPath: "/nonexistent"))
        }
        #expect(faults == [nil, "no file docs/c.md", nil, nil, "no heading #x in docs/a.md"])
    }
}

/// The Swift snippets of the documents are in Tests/DocumentSnippets, which the build compiles.
@Suite struct `Swift snippets of documents` {
    @Test func `each is compiled, and each that is compiled is in a document`() throws {
        let root = PackagedProgram.repository
        func lines(_ text: some StringProtocol) -> [String] {
            text.split(separator: "\n").map { $0.trimmingCharacters(in: .whitespaces) }
        }
        let compiled = lines(
            try String(
                contentsOf: root.appendingPathComponent("Tests/DocumentSnippets/Snippets.swift"), encoding: .utf8)
        ).joined(separator: "\n")
        var documented = 0
        for document in try Document.all(below: root) {
            let text = try String(contentsOf: root.appendingPathComponent(document.path), encoding: .utf8)
            for block in text.matches(of: #/(?m)^ *```swift\n((?s).*?)\n *```$/#) {
                documented += 1
                let snippet = lines(block.output.1).joined(separator: "\n")
                #expect(compiled.contains(snippet), "\(document.path): \(snippet)")
            }
        }
        #expect(documented == 3, "Snippets.swift has a function or type for each")
    }
}

/// The links and anchors of a Markdown file.
private struct Document {
    /// Relative to the root, with slashes.
    let path: String
    /// The targets of its links, except links with a scheme.
    let links: [String]
    /// The anchors of its headings.
    let anchors: [String]

    init(path: String, text: String) {
        self.path = path
        var isCode = false
        var prose: [String] = []
        var anchors: [String] = []
        for line in text.split(separator: "\n", omittingEmptySubsequences: false) {
            if line.drop(while: { $0 == " " }).hasPrefix("```") {
                isCode.toggle()
            } else if !isCode {
                if line.hasPrefix("#"), line.drop(while: { $0 == "#" }).hasPrefix(" ") {
                    anchors.append(Self.anchor(of: line, after: anchors))
                }
                prose.append(String(line).replacing(#/`+[^`]*`+/#, with: "code"))
            }
        }
        self.anchors = anchors
        links = prose.joined(separator: "\n").matches(of: #/\]\(([^)\s]+)\)/#).map { String($0.output.1) }
            .filter { !$0.contains(":") }
    }

    static func all(below root: URL) throws -> [Document] {
        let left = [".build", ".run", "dist", ".git"]
        let files = try #require(FileManager.default.enumerator(atPath: root.path))
        var documents: [Document] = []
        while let path = files.nextObject() as? String {
            if left.contains(path) { files.skipDescendants() }
            guard path.hasSuffix(".md") else { continue }
            let text = try String(contentsOf: root.appendingPathComponent(path), encoding: .utf8)
            documents.append(Document(path: path, text: text))
        }
        return documents
    }

    /// What is wrong with a link of this document; nil if nothing is.
    func fault(of link: String, among documents: [Document], root: URL) -> String? {
        let parts = link.split(separator: "#", maxSplits: 1, omittingEmptySubsequences: false).map(String.init)
        let folder = URL(fileURLWithPath: "/" + path).deletingLastPathComponent()
        let absolute = folder.appendingPathComponent(parts[0]).standardized.path
        let target = parts[0].isEmpty ? path : String(absolute.dropFirst())
        let document = documents.first { $0.path == target }
        guard document != nil || FileManager.default.fileExists(atPath: root.appendingPathComponent(target).path) else {
            return "no file \(target)"
        }
        guard parts.count > 1 else { return nil }
        return document?.anchors.contains(parts[1]) == true ? nil : "no heading #\(parts[1]) in \(target)"
    }

    /// The anchor as the usual hosts make it: lower case, without punctuation, with a number if it is repeated.
    private static func anchor(of heading: Substring, after others: [String]) -> String {
        let text = String(heading.drop { $0 == "#" }).replacing(#/\[([^\]]*)\]\([^)]*\)/#) { $0.output.1 }
        let anchor = text.trimmingCharacters(in: .whitespaces).lowercased()
            .filter { $0.isLetter || $0.isNumber || $0 == " " || $0 == "-" || $0 == "_" }
            .replacingOccurrences(of: " ", with: "-")
        let count = others.count { other in
            other == anchor || other.hasPrefix(anchor + "-") && Int(other.dropFirst(anchor.count + 1)) != nil
        }
        return count == 0 ? anchor : "\(anchor)-\(count)"
    }
}
