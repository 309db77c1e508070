// Writes the files of migrations/ into one Swift file of string literals, so that the installed binary needs no checkout.
// The build-tool plugin EmbedMigrations runs it: embed-migrations OUTPUT FOLDER FILE…
import FoundationEssentials

let arguments = CommandLine.arguments.dropFirst()
guard arguments.count >= 2, let output = arguments.first, let folder = arguments.dropFirst().first else {
    fatalError("usage: embed-migrations OUTPUT FOLDER FILE…")
}
let root = folder.hasSuffix("/") ? folder : folder + "/"
var source =
    "// Generated from migrations/ by embed-migrations; do not edit.\n\nenum EmbeddedSQL {\n    static let files: [(name: String, text: String)] = [\n"
for path in arguments.dropFirst(2).sorted() {
    guard path.hasPrefix(root) else { fatalError("\(path) is not in \(root)") }
    let text = try String(contentsOfFile: path, encoding: .utf8)
    // Three number signs, because no SQL closes such a literal. The content begins and ends on its own lines.
    source +=
        "        (\n            name: \"\(path.dropFirst(root.count))\",\n            text: ###\"\"\"\n\(text)\n\"\"\"###),\n"
}
source += "    ]\n}\n"
// An unchanged file keeps its date: otherwise a build that only relinks this tool would compile TokenLedger again.
if (try? String(contentsOfFile: output, encoding: .utf8)) != source {
    try source.write(toFile: output, atomically: true, encoding: .utf8)
}
