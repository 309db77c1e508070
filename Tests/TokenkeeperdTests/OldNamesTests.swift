import Foundation
import Testing

@Suite struct `Old names` {
    private static let root = URL(filePath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
        .deletingLastPathComponent()

    private static func text(_ path: String) throws -> String {
        try String(contentsOf: root.appending(path: path), encoding: .utf8)
    }

    /// Everything that people read: documents, man pages, SQL, scripts, the package and the sources.
    private static func files() throws -> [String] {
        let folders = [
            "docs", "man", "migrations", "systemd", "debian", "scripts", "Sources", "Benchmarks", "Tests/deployment",
        ]
        let found = folders.flatMap { folder -> [String] in
            let names = FileManager.default.enumerator(atPath: root.appending(path: folder).path)
            return (names?.allObjects as? [String] ?? []).map { "\(folder)/\($0)" }
        }
        let readable: Set = ["md", "5", "8", "sql", "toml", "service", "swift", "conf", "svg", "tsv", ""]
        return (found + ["README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile"]).filter { path in
            var isFolder: ObjCBool = false
            return FileManager.default.fileExists(atPath: root.appending(path: path).path, isDirectory: &isFolder)
                && !isFolder.boolValue && readable.contains(URL(filePath: path).pathExtension)
        }
    }

    @Test func `none is left in any text that people read`() throws {
        let names = try Self.text("Tests/TokenkeeperdTests/old-names.txt").split(separator: "\n")
            .filter { !$0.hasPrefix("#") }
        let words = names.map { NSRegularExpression.escapedPattern(for: String($0)) }.joined(separator: "|")
        let pattern = try NSRegularExpression(pattern: "(?<![A-Za-z0-9_])(?:\(words))(?![A-Za-z0-9_])")
        #expect(names.count > 50)
        let files = try Self.files()
        #expect(files.count > 200)
        for path in files {
            for (number, line) in try Self.text(path).components(separatedBy: "\n").enumerated() {
                // The hint for an old key has to name it.
                if path.hasSuffix("Configuration/Setting.swift"), line.contains("\": \"") { continue }
                let whole = NSRange(line.startIndex..., in: line)
                let hit = pattern.firstMatch(in: line, range: whole).flatMap { Range($0.range, in: line) }
                #expect(hit == nil, "\(path):\(number + 1): \(line)")
            }
        }
    }
}
