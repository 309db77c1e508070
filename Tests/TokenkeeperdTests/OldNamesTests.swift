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

    /// Old names that have another meaning now, and where: `unregistered_at` is the instant of a logout, in the tables
    /// unregistration_receipt and held_registration.
    private static func isNew(_ name: Substring, in path: String) -> Bool {
        name == "unregistered_at"
            && (path.hasPrefix("migrations/") || path.hasPrefix("docs/reference/sql")
                || path.hasSuffix("/History/HistoryReading.swift"))
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
                let hits = pattern.matches(in: line, range: whole).compactMap { Range($0.range, in: line) }
                    .map { line[$0] }.filter { !Self.isNew($0, in: path) }
                #expect(hits.isEmpty, "\(path):\(number + 1): \(line)")
            }
        }
    }
}
