// Writes the files of migrations/ into one Swift file of string literals, so that the installed binary needs no checkout.
// Run by the build-tool plugin EmbedMigrations: embed-migrations OUTPUT FILE…
import FoundationEssentials

let arguments = CommandLine.arguments.dropFirst()
guard let output = arguments.first else {
    fatalError("usage: embed-migrations OUTPUT FILE…")
}
var source =
    "// Generated from migrations/ by embed-migrations; not to be edited.\n\nenum EmbeddedSQL {\n    static let files: [(name: String, text: String)] = [\n"
for path in arguments.dropFirst().sorted() {
    let text = try String(contentsOfFile: path, encoding: .utf8)
    let name = path.split(separator: "/").last ?? ""
    // Three number signs: no SQL closes such a literal. The content begins and ends on lines of its own.
    source += "        (\n            name: \"\(name)\",\n            text: ###\"\"\"\n\(text)\n\"\"\"###),\n"
}
source += "    ]\n}\n"
try source.write(toFile: output, atomically: true, encoding: .utf8)
