internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Shows what a removal takes from the database.
struct Uninstall: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "List what a removal takes from a database, or print the SQL that does it.",
        discussion: """
            Changes nothing itself. First stop what uses it: docs/how-to/remove.md says how. Then have a superuser run \
            what --print shows. It deletes the ledger: nothing remembers then which tokens are suppressed. Roles that \
            another database uses stay.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "List what would be removed, with rows and sizes.")
    var dryRun = false

    @Flag(help: "Only print the SQL, for psql.")
    var print = false

    @Flag(help: "With --dry-run: print JSON.")
    var json = false

    func validate() throws {
        if dryRun == print || (json && print) {
            throw ValidationError("Expected --dry-run, with or without --json, or --print: it removes nothing itself.")
        }
    }

    func run() throws {
        Signals.unblock()
        try options.load().withNamedDatabase(writes: false) { connection in
            let removal = try Removal.plan(on: &connection)
            if json { return Swift.print(try JSONOutput.array(removal.map { $0.items + $0.staying } ?? [])) }
            guard let removal else { return Swift.print("-- this database has nothing of tokenkeeperd") }
            Swift.print(
                print ? removal.script : Self.text(removal, in: connection.name), terminator: print ? "" : "\n")
        }
    }

    /// Smaller tables are only counted.
    private static let shown = 10

    static func text(_ removal: Removal, in database: String) -> String {
        let tables = removal.items.filter { $0.kind == "table" }
        let hidden = tables.dropFirst(shown)
        let listed = removal.items.filter { item in !hidden.contains(item) }
        let width = (listed + removal.staying).map(\.kind.count).max() ?? 0
        func line(_ item: Removal.Item) -> String {
            let extent = item.bytes.map { "\(counted(item.rows ?? 0, "row", "rows")), \(size($0))" }
            let kind = item.kind + String(repeating: " ", count: width - item.kind.count)
            return "  " + ([kind, item.name] + [extent, item.about].compactMap(\.self)).joined(separator: "  ")
        }
        var lines = [database, "would remove:"] + listed.map(line)
        if let last = listed.lastIndex(where: { $0.kind == "table" }), !hidden.isEmpty {
            let bytes = hidden.reduce(0) { $0 + ($1.bytes ?? 0) }
            lines.insert(
                "  and \(counted(hidden.count, "smaller table", "smaller tables")), \(size(bytes))", at: last + 3)
        }
        if !removal.staying.isEmpty { lines += ["would keep:"] + removal.staying.map(line) }
        return (lines + ["nothing has been changed; numbers of rows are estimates"]).map(HistoryText.plain)
            .joined(separator: "\n")
    }

    /// `512 kB`, `34 MB`.
    static func size(_ bytes: Int64) -> String {
        bytes < 10 << 20 ? "\((bytes + 1023) >> 10) kB" : "\(bytes >> 20) MB"
    }
}
