// Writes the files of migrations/ into one Swift file of string literals, so that the installed binary needs no checkout: the versions by name, the files
// of functions and views as the file load-order lists them, then grants.sql, and the router's file.
// The build-tool plugin EmbedMigrations runs it: embed-migrations OUTPUT FOLDER FILE…
import FoundationEssentials

let arguments = CommandLine.arguments.dropFirst()
guard arguments.count >= 2, let output = arguments.first, let folder = arguments.dropFirst().first else {
    fatalError("usage: embed-migrations OUTPUT FOLDER FILE…")
}
let root = folder.hasSuffix("/") ? folder : folder + "/"
var source =
    "// Generated from migrations/ by embed-migrations; do not edit.\n\nenum EmbeddedSQL {\n    static let files: [(name: String, text: String)] = [\n"
let found = Set(
    arguments.dropFirst(2).map { path in
        guard path.hasPrefix(root) else { fatalError("\(path) is not in \(root)") }
        return String(path.dropFirst(root.count))
    })
let versions = found.filter { $0.hasPrefix("versions/") }.sorted()
let listed = try String(contentsOfFile: root + "load-order", encoding: .utf8).split(separator: "\n")
    .filter { !$0.hasPrefix("#") }.map { "\($0).sql" }
let unlisted = found.subtracting(versions).subtracting(listed).subtracting(["grants.sql", "router/router.sql"]).sorted()
guard unlisted == [] else { fatalError("not in migrations/load-order: \(unlisted.joined(separator: ", "))") }
for name in versions + listed + ["grants.sql", "router/router.sql"] {
    let text = try String(contentsOfFile: root + name, encoding: .utf8)
    // Three number signs, because no SQL closes such a literal. The content begins and ends on its own lines.
    source +=
        "        (\n            name: \"\(name)\",\n            text: ###\"\"\"\n\(text)\n\"\"\"###),\n"
}
source += "    ]\n}\n"
// An unchanged file keeps its date: otherwise a build that only relinks this tool would compile TokenLedger again.
if (try? String(contentsOfFile: output, encoding: .utf8)) != source {
    try source.write(toFile: output, atomically: true, encoding: .utf8)
}
