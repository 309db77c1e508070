import APNsFeedback
import Foundation
import LedgerTestSupport
import Testing
import TokenLedger
import TokenModel

@testable import tokenkeeperd

/// The reference pages agree with the sources. With `REFERENCE=write` in the environment, the tests rewrite the pages instead of
/// failing; see CONTRIBUTING.md. Text outside the marked blocks is written by hand and stays.
@Suite(.serialized) struct `The reference pages` {
    @Test func `configuration.md and the man page list every setting`() throws {
        try ReferencePage("docs/reference/configuration.md").check([
            "settings": SettingsText.table(Setting.table),
            "credential settings": SettingsText.table(Setting.ofCredentials, prefix: "credential.NAME."),
        ])
        try ReferencePage("man/tokenkeeperd.toml.5").check([
            "keys": SettingsText.list(Setting.table),
            "credential keys": SettingsText.manual(Setting.ofCredentials, prefix: "credential.NAME."),
        ])
    }

    @Test func `cli.md shows the help of every command`() throws {
        let page = try ReferencePage("docs/reference/cli.md")
        try page.check(["commands": HelpText.all()])
        for status in [ExitStatus.success, .usage, .unavailable, .failed, .output, .busy, .configuration] {
            #expect(page.text.contains("| \(status.rawValue) |"), "exit status \(status.rawValue)")
        }
    }

    @Test func `sql.md lists every object that a role may use`() throws {
        let database = try TestCluster.shared.database()
        var connection = try database.connect()
        let catalog = try Catalog(&connection)
        #expect(
            catalog.objects.contains { $0.name == "send_result" } && catalog.objects.contains { $0.name == "register" })
        for object in catalog.objects { #expect(object.comment != nil, "\(object.name) has a comment") }
        try ReferencePage("docs/reference/sql.md").check([
            "sender": catalog.text(of: "sender"), "app": catalog.text(of: "app"), "reader": catalog.text(of: "reader"),
            "operator": catalog.text(of: "operator"),
        ])
    }

    @Test func `events-and-states.md explains every word that the schema allows`() throws {
        let database = try TestCluster.shared.database()
        var connection = try database.connect()
        let page = try ReferencePage("docs/reference/events-and-states.md")
        for (block, column) in [
            ("events", "token_event_log.event"), ("operations", "operation.operation"),
            ("outcomes", "sweep_run.outcome"), ("triggers", "sweep_run.trigger"), ("gate", "topic.gate"),
        ] {
            let parts = column.split(separator: ".")
            let found = try connection.scalar(
                """
                SELECT string_agg(word[1], ' ') FROM pg_constraint,
                       regexp_matches(pg_get_constraintdef(oid), '''([a-z_]+)''::text', 'g') AS word
                WHERE conrelid = 'tokenkeeper.\(parts[0])'::regclass AND contype = 'c'
                  AND pg_get_constraintdef(oid) LIKE 'CHECK ((\(parts[1]) = ANY%'
                """)
            let words = try #require(found, "\(column) has a list of words").split(separator: " ").map(String.init)
            try page.check(block, rows: words.map { ([$0], $0) })
        }
        let states = try #require(
            try connection.scalar(
                "SELECT string_agg(pg_get_functiondef(oid), '') FROM pg_proc WHERE oid::regproc IN ('tokenkeeper.state_of', 'tokenkeeper.cause_of')"
            ))
        for state in ["active", "stale", "suspect", "superseded", "unregistered_by_app"] {
            #expect(states.contains("'\(state)'") && page.text.contains("| `\(state)` |"), "\(state)")
        }
        try page.check(["results": ResponseText.table()])
    }

    @Test func `log-messages.md explains every message`() throws {
        let page = try ReferencePage("docs/reference/log-messages.md")
        let messages = try LogMessage.all()
        #expect(messages.count > 25, "the scan finds them: \(messages.map(\.text))")
        for (block, levels) in [
            ("errors", ["critical", "error"]), ("warnings", ["warning"]),
            ("others", ["notice", "info", "debug", "trace", "varies"]),
        ] {
            let chosen = messages.filter { levels.contains($0.level) }
            try page.check(block, rows: chosen.map { ([$0.text], $0.level + $0.fields) })
        }
        // For messages whose whole text varies, the page explains each text, which must occur in the sources.
        let sources = try Sources.all().map(\.text).joined()
        for key in page.keys(of: "varying") {
            for part in key.split(separator: "…").map({ $0.trimmingCharacters(in: .whitespaces) }) where part.count > 3
            {
                let isThere = sources.contains(part)
                #expect(isThere, "\(part)")
            }
        }
    }

    @Test(arguments: ["CONTRIBUTING.md", "docs/architecture.md"])
    func `every file, folder and type that a page for contributors names exists`(page: String) throws {
        let text = try String(contentsOf: Sources.root.appendingPathComponent(page), encoding: .utf8)
        let names = Set(text.matches(of: /`([A-Za-z0-9_.\/-]+)`/).map { String($0.1) })
        #expect(names.count > 20, "the pattern finds them")
        let sources = try Sources.all()
        let code = sources.map(\.text).joined()
        for name in names.sorted() {
            if name.contains(/^(Sources|Tests|migrations|docs|scripts|systemd|debian)\//) {
                let path = Sources.root.appendingPathComponent(name).path
                #expect(FileManager.default.fileExists(atPath: path), "\(name)")
            } else if name.hasSuffix(".swift") {
                let isThere = sources.contains { $0.path.hasSuffix("/\(name)") }
                #expect(isThere, "\(name)")
            } else if name.contains(/^[A-Z][a-z]+([A-Z][a-z]+)+$/) {
                let isThere = code.range(of: name) != nil
                #expect(isThere, "\(name)")
            }
        }
    }

    @Test func `a page that differs is noticed, and rewriting keeps text written by hand`() throws {
        let before = "# Page\n<!-- generated: a -->\nold\n<!-- end: a -->\nby hand\n"
        #expect(ReferencePage.replacing("a", in: before, by: "new\n") == before.replacing("old", with: "new"))
        #expect(ReferencePage.replacing("b", in: before, by: "new\n") == nil)

        let table = "| `a b c` | info | what a means |\n| `gone` | info | what was |\n"
        let rows = MarkedTable(table).rewritten([(["a b d"], "warning"), (["new"], "info")])
        #expect(
            rows == "| `a b d` | warning | what a means |\n| `new` | info | TO BE WRITTEN |\n"
                + "| `gone` | info | what was |\n")
    }

    @Test func `the scan reads a call of the logger`() throws {
        let call =
            #"logger.log(level: late ? .warning : .info, late ? "late \(f("x")) now" : "fine", metadata: ["a": "\(b)"])"#
        #expect(
            LogMessage.all(in: call) == [
                LogMessage(text: "late … now", level: "warning", fields: " · a"),
                LogMessage(text: "fine", level: "info", fields: " · a"),
            ])
    }
}

// MARK: - Pages

/// A page of the documents, with blocks between `generated: NAME` and `end: NAME`.
private final class ReferencePage {
    private let url: URL
    private(set) var text: String
    private static let writes = ProcessInfo.processInfo.environment["REFERENCE"] == "write"

    init(_ path: String) throws {
        url = Sources.root.appendingPathComponent(path)
        text = try String(contentsOf: url, encoding: .utf8)
    }

    /// Generated blocks equal the text made from the sources, byte by byte.
    func check(_ blocks: [String: String]) throws {
        for (name, generated) in blocks.sorted(by: { $0.key < $1.key }) {
            let wanted = try #require(
                Self.replacing(name, in: text, by: generated), "\(url.lastPathComponent) has no block \(name)")
            if Self.writes {
                text = wanted
                try text.write(to: url, atomically: true, encoding: .utf8)
            }
            #expect(
                text == wanted, "\(url.lastPathComponent), block \(name), differs: run it with REFERENCE=write")
        }
    }

    /// A table has exactly these rows, and the last cell of each is written by hand.
    func check(_ block: String, rows: [(keys: [String], middle: String)]) throws {
        let range = try #require(Self.range(of: block, in: text), "\(url.lastPathComponent) has no block \(block)")
        let head = text[range].split(separator: "\n").prefix { !$0.hasPrefix("|---") }.count + 1
        let lines = text[range].split(separator: "\n", omittingEmptySubsequences: false)
        let body = lines.dropFirst(head).joined(separator: "\n")
        // Two columns if the middle one adds nothing.
        let isTwo = rows.allSatisfy { $0.keys == [$0.middle] }
        if Self.writes {
            let new = MarkedTable(body).rewritten(rows.map { ($0.keys, isTwo ? "" : $0.middle) })
            text.replaceSubrange(range, with: lines.prefix(head).joined(separator: "\n") + "\n" + new)
            try text.write(to: url, atomically: true, encoding: .utf8)
        }
        let table = MarkedTable(text[Self.range(of: block, in: text) ?? range].description)
        #expect(
            Set(table.rows.map(\.key)) == Set(rows.flatMap(\.keys)), "\(url.lastPathComponent), table \(block)")
        for row in table.rows {
            #expect(!row.meaning.contains("TO BE WRITTEN") && row.meaning.count > 3, "\(row.key) is explained")
            guard !isTwo, let wanted = rows.first(where: { $0.keys.contains(row.key) }) else { continue }
            #expect(row.middle == wanted.middle, "\(row.key)")
        }
    }

    /// The first cells of a table that is written by hand.
    func keys(of block: String) -> [String] {
        Self.range(of: block, in: text).map { MarkedTable(String(text[$0])).rows.map(\.key) } ?? []
    }

    private static func range(of block: String, in text: String) -> Range<String.Index>? {
        for (open, close) in [("<!-- ", " -->"), (".\\\" ", "")] {
            guard let begin = text.range(of: "\(open)generated: \(block)\(close)\n"),
                let end = text.range(of: "\(open)end: \(block)\(close)\n", range: begin.upperBound..<text.endIndex)
            else { continue }
            return begin.upperBound..<end.lowerBound
        }
        return nil
    }

    static func replacing(_ block: String, in text: String, by generated: String) -> String? {
        range(of: block, in: text).map { text.replacingCharacters(in: $0, with: generated) }
    }
}

/// The rows of a Markdown table whose first cell is code.
private struct MarkedTable {
    struct Row {
        var key: String
        var middle: String
        var meaning: String
    }

    var rows: [Row] = []

    init(_ text: String) {
        for line in text.split(separator: "\n") where line.hasPrefix("| `") {
            let cells = line.dropFirst(2).dropLast(2).split(separator: " | ", omittingEmptySubsequences: false)
                .map(String.init)
            guard cells.count >= 2 else { continue }
            rows.append(
                Row(
                    key: cells[0].trimmingCharacters(in: CharacterSet(charactersIn: "` ")),
                    middle: cells.count > 2 ? cells[1] : "",
                    meaning: cells.dropFirst(cells.count > 2 ? 2 : 1).joined(separator: " | ")))
        }
    }

    /// The same table with other rows. Handwritten text stays with its row, even if the row has been reworded. Text that fits no
    /// row stays at the end, so that nothing gets lost and the test fails until somebody has checked it.
    func rewritten(_ wanted: [(keys: [String], middle: String)]) -> String {
        let names = Set(wanted.flatMap(\.keys))
        var orphans = rows.filter { !names.contains($0.key) }
        var text = ""
        for (keys, middle) in wanted {
            for key in keys {
                var meaning = rows.first { $0.key == key }?.meaning
                if meaning == nil,
                    let best = orphans.indices.max(by: {
                        Self.likeness(orphans[$0].key, key) < Self.likeness(orphans[$1].key, key)
                    }), Self.likeness(orphans[best].key, key) >= 0.4
                {
                    meaning = orphans.remove(at: best).meaning
                }
                text += Self.line(key, middle, meaning ?? "TO BE WRITTEN")
            }
        }
        for row in orphans { text += Self.line(row.key, row.middle, row.meaning) }
        return text
    }

    private static func line(_ key: String, _ middle: String, _ meaning: String) -> String {
        let code = key.contains("`") ? "`` \(key) ``" : "`\(key)`"
        return "| \(code) | \(middle.isEmpty ? "" : "\(middle) | ")\(meaning) |\n"
    }

    private static func likeness(_ left: String, _ right: String) -> Double {
        let words = [left, right].map { Set($0.lowercased().split { !$0.isLetter }) }
        let all = words[0].union(words[1]).count
        return all == 0 ? 0 : Double(words[0].intersection(words[1]).count) / Double(all)
    }
}

private enum Sources {
    static let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent().appendingPathComponent("../..")
        .standardizedFileURL

    static func all() throws -> [(path: String, text: String)] {
        let folder = root.appendingPathComponent("Sources")
        let files =
            FileManager.default.enumerator(at: folder, includingPropertiesForKeys: nil)?.allObjects as? [URL] ?? []
        return try files.filter { $0.pathExtension == "swift" }.sorted { $0.path < $1.path }
            .map { ($0.path, try String(contentsOf: $0, encoding: .utf8)) }
    }
}

// MARK: - What the sources say

private enum SettingsText {
    static func table(_ settings: [Setting], prefix: String = "") -> String {
        var text = "| key | default | values | takes effect |\n|---|---|---|---|\n"
        for setting in settings {
            let unset = prefix.isEmpty ? "unset" : "none"
            let cells = [
                "`\(prefix)\(setting.key)`", setting.documentedDefault.map { "`\($0)`" } ?? unset,
                kind(setting.expected), setting.reloadable ? "reload" : "restart",
            ]
            text += "| \(cells.joined(separator: " | ")) |\n"
        }
        text += "\n"
        for setting in settings { text += "- `\(prefix)\(setting.key)`: \(setting.meaning)\n" }
        return text
    }

    /// What a setting expects, by the kinds of values that the page explains.
    private static func kind(_ expected: String) -> String {
        [
            ("a duration such as \"90s\" or \"30d\"", "duration"), ("a text", "text"), ("a whole number", "number"),
            ("a share such as \"0.5%\", from 0% to 100%, of at most four decimal places", "share"),
            ("true or false (on or off in a variable or flag)", "boolean"),
            (" (separated by blanks in a variable or flag)", ""),
        ].reduce(expected) { $0.replacing($1.0, with: $1.1) }
    }

    /// The keys with their defaults, one a line.
    static func list(_ settings: [Setting]) -> String {
        settings.map { setting in
            let about = "default: \(setting.documentedDefault ?? "unset")\(setting.reloadable ? "" : "; restart")"
            return ".BR \(setting.key) \" (\(escaped(about)))\"\n.br\n"
        }.joined()
    }

    static func manual(_ settings: [Setting], prefix: String) -> String {
        settings.map { setting in
            let value = setting.documentedDefault.map { " \" (default: \(escaped($0)))\"" } ?? ""
            return ".TP\n.BR \(prefix)\(setting.key)\(value)\n\(escaped(setting.meaning))\n"
        }.joined()
    }

    private static func escaped(_ text: String) -> String {
        text.replacing("\\", with: "\\e").replacing("-", with: "\\-")
    }
}

private enum HelpText {
    static func all() throws -> String {
        var text = ""
        for group in Tokenkeeperd.configuration.groupedSubcommands {
            text += "## \(group.name) commands\n\n"
            for command in group.subcommands {
                let name = command._commandName
                text += try section([name])
                for part in command.configuration.subcommands { text += try section([name, part._commandName]) }
            }
        }
        return text
    }

    private static func section(_ command: [String]) throws -> String {
        let help = try ProgramRun([DaemonProcess.program] + command + ["--help"], environment: ["COLUMNS": "100"])
        try #require(help.status == 0, "\(command)")
        let marks = command.count == 1 ? "###" : "####"
        // What every command has is said once, at the beginning of the page.
        let own = help.output.replacing(#/  --config <path>(?s:.)*?  --set <set>[^\n]*\n/#, with: "")
            .replacing(#/  --version [^\n]*\n  -h, --help [^\n]*(\n|$)/#, with: "")
            .replacing(" [--config <path>] [--database-url <database-url>] [--set <set> ...]", with: "")
            .replacing(#/OPTIONS:\s*(\n\n|$)/#, with: "")
        return "\(marks) tokenkeeperd \(command.joined(separator: " "))\n\n```text\n"
            + own.trimmingCharacters(in: .newlines) + "\n```\n\n"
    }
}

/// What the schema grants to the roles, from the catalog.
private struct Catalog: Decodable {
    struct Column: Decodable {
        var name: String
        var type: String
        var value: String?
        var comment: String?

        var isInternal: Bool { comment?.hasPrefix("Internal") == true }

        /// As people write it, and not as the catalog spells it out.
        mutating func shorten() {
            type = type.replacing("timestamp with time zone", with: "timestamptz")
            value = value?.replacing(/::(text|integer|timestamp with time zone)(\[\])?/, with: "")
        }
    }

    struct Grant: Decodable {
        var role: String
        var rights: [String]
    }

    struct Object: Decodable {
        var name: String
        var comment: String?
        var columns: [Column]
        var result: String?
        /// Those of a function, as pg_get_function_arguments prints them.
        var arguments: String?
        var grants: [Grant]

        /// Any version may change it, or it is an overload that the comment of the other one describes.
        var isLeftOut: Bool {
            guard let comment else { return false }
            return comment.hasPrefix("Internal") || comment.hasPrefix("As \(name), with a number")
        }

        /// The columns that a role other than the daemon may use, without internal ones.
        var shownColumns: [Column] {
            let rights = grants.filter { $0.role != "daemon" }.flatMap(\.rights)
            let isWhole = rights.contains { !$0.contains(" of ") }
            let named = Set(rights.flatMap { Self.columns(of: $0) })
            return columns.filter { !$0.isInternal && (isWhole || named.contains($0.name)) }
        }

        /// The columns that a right names; none if it is for all.
        static func columns(of right: String) -> [String] {
            let parts = right.components(separatedBy: " of ")
            return parts.count < 2 ? [] : parts[1].components(separatedBy: ", ")
        }

        /// As people write it, and not as the catalog spells it out.
        mutating func shorten() {
            for column in columns.indices { columns[column].shorten() }
            result = result.map(Self.short)
            arguments = arguments.map(Self.short)
        }

        private static func short(_ text: String) -> String {
            text.replacing("timestamp with time zone", with: "timestamptz").replacing("tokenkeeper.", with: "")
                .replacing(/::[a-z]+(\[\])?/, with: "").replacing(" DEFAULT ", with: "=")
        }
    }

    var objects: [Object]

    init(_ connection: inout Connection) throws {
        let text = try #require(try connection.scalar(Self.query))
        objects = try JSONDecoder().decode([Object].self, from: Data(text.utf8))
        for object in objects.indices { objects[object].shorten() }
    }

    /// The roles in the order of the pages: an object is described for the first one that may use it.
    private static let roles = ["sender", "app", "reader", "operator", "daemon", "monitor"]

    /// The objects of a role, without internal ones.
    func text(of role: String) -> String {
        objects.filter { object in
            !object.isLeftOut
                && Self.roles.first { one in object.grants.contains { $0.role == one } } == role
        }.map { $0.result == nil ? relation($0, of: role) : function($0, of: role) }.joined()
    }

    /// Columns that stand together and have no comment share a line. A default says something to those who insert.
    private func relation(_ object: Object, of role: String) -> String {
        let takesRows = object.grants.contains { grant in
            grant.role != "daemon" && grant.rights.contains { $0.hasPrefix("INSERT") }
        }
        var lines: [String] = []
        var bare: [(names: String, type: String)] = []
        for column in object.shownColumns {
            let name = "`\(column.name)`"
            let type = column.type + (takesRows ? column.value.map { " = `\($0)`" } ?? "" : "")
            if let comment = column.comment {
                if !bare.isEmpty { lines.append(Self.line(bare)) }
                bare = []
                lines.append("\(name) \(type): \(comment)")
            } else if let last = bare.last, last.type == type {
                bare[bare.count - 1].names += ", " + name
            } else {
                bare.append((names: name, type: type))
            }
        }
        if !bare.isEmpty { lines.append(Self.line(bare)) }
        let list = lines.map { "- \($0)\n" }.joined()
        return "### \(object.name)\n\n\(object.comment ?? "")\n\n\(list)\n" + rights(object, of: role)
    }

    /// Neighbors of one type name it once.
    private static func line(_ columns: [(names: String, type: String)]) -> String {
        columns.map { "\($0.names) \($0.type)" }.joined(separator: "; ")
    }

    private func function(_ object: Object, of role: String) -> String {
        let others = Self.roles.filter { one in
            one != role && one != "daemon" && object.grants.contains { $0.role == one }
        }
        let also = others.isEmpty ? "" : ", also for \(others.joined(separator: ", "))"
        return "### \(object.name)\n\n`\(object.name)(\(object.arguments ?? ""))` returns "
            + "`\(object.result ?? "")`\(also)\n\n\(object.comment ?? "")\n\n"
    }

    /// Roles with the same rights together, without the daemon. What the page says of all that readers may read is left out.
    private func rights(_ object: Object, of role: String) -> String {
        var groups: [(roles: [String], rights: String)] = []
        for one in Self.roles where one != "daemon" {
            guard let grant = object.grants.first(where: { $0.role == one }) else { continue }
            var rights = grant.rights.map { short($0, of: object) }
            if role == "reader" && ["reader", "operator"].contains(one) { rights.removeAll { $0 == "SELECT" } }
            // Which columns an exporter may read, grants.sql says.
            if one == "monitor" && grant.rights.contains(where: { $0.contains(" of ") }) { rights = ["some columns"] }
            let text = rights.joined(separator: ", ")
            if text.isEmpty { continue }
            if let same = groups.firstIndex(where: { $0.rights == text }) {
                groups[same].roles.append(one)
            } else {
                groups.append(([one], text))
            }
        }
        let texts = groups.map { "\($0.roles.joined(separator: ", ")) (\($0.rights))" }
        return texts.isEmpty ? "" : "\(role == "reader" ? "Also" : "Roles"): \(texts.joined(separator: "; ")).\n\n"
    }

    /// A right without the columns if they are all that the page shows, and with the others if those are fewer.
    private func short(_ right: String, of object: Object) -> String {
        let granted = Set(Object.columns(of: right))
        let others = object.shownColumns.map(\.name).filter { !granted.contains($0) }
        guard let verb = right.components(separatedBy: " of ").first, !granted.isEmpty else { return right }
        if others.isEmpty { return verb }
        return others.count + 2 < granted.count ? "\(verb) of all but \(others.joined(separator: ", "))" : right
    }

    private static let query = """
        WITH role AS (
            SELECT oid, substr(rolname, length('tokenkeeper_') + 1) AS name FROM pg_roles
            WHERE rolname IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_monitor',
                'tokenkeeper_operator', 'tokenkeeper_daemon')
        ), relation AS (
            SELECT * FROM pg_class WHERE relnamespace = 'tokenkeeper'::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition
        ), granted AS (
            SELECT c.oid, r.name, a.privilege_type AS right_, NULL::text AS of_column FROM relation AS c, aclexplode(c.relacl) AS a, role AS r
            WHERE r.oid = a.grantee
            UNION ALL
            SELECT c.oid, r.name, a.privilege_type, t.attname FROM relation AS c JOIN pg_attribute AS t ON t.attrelid = c.oid,
                   aclexplode(t.attacl) AS a, role AS r WHERE r.oid = a.grantee AND t.attnum > 0 AND NOT t.attisdropped
            UNION ALL
            SELECT p.oid, r.name, a.privilege_type, NULL FROM pg_proc AS p, aclexplode(p.proacl) AS a, role AS r
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND r.oid = a.grantee
        ), rights AS (
            SELECT oid, name, array_agg(word ORDER BY word) AS words FROM (
                SELECT oid, name, right_ || coalesce(' of ' || string_agg(of_column, ', ' ORDER BY of_column), '') AS word
                FROM granted GROUP BY oid, name, right_, of_column IS NULL
            ) AS one GROUP BY oid, name
        ), grants AS (
            SELECT oid, json_agg(json_build_object('role', name, 'rights', words) ORDER BY name) AS list FROM rights GROUP BY oid
        ), object AS (
            SELECT c.relname::text AS name, obj_description(c.oid, 'pg_class') AS comment, NULL AS result, NULL AS arguments,
                   g.list AS grants, (
                       SELECT json_agg(json_build_object(
                           'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod),
                           'value', CASE WHEN a.attidentity <> '' THEN 'identity' WHEN a.attgenerated <> '' THEN 'generated'
                                    ELSE pg_get_expr(d.adbin, d.adrelid) END,
                           'comment', col_description(c.oid, a.attnum)) ORDER BY a.attnum)
                       FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                       WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                   ) AS columns
            FROM relation AS c JOIN grants AS g USING (oid)
            UNION ALL
            SELECT p.proname, obj_description(p.oid, 'pg_proc'), pg_get_function_result(p.oid),
                   pg_get_function_arguments(p.oid), g.list, coalesce((
                       SELECT json_agg(json_build_object(
                           'name', p.proargnames[n], 'type', format_type(p.proargtypes[n - 1], NULL),
                           'value', pg_get_function_arg_default(p.oid, n)) ORDER BY n)
                       FROM generate_series(1, p.pronargs) AS n
                   ), '[]')
            FROM pg_proc AS p JOIN grants AS g USING (oid)
        )
        SELECT json_agg(json_build_object('name', name, 'comment', comment, 'columns', columns, 'result', result,
                                          'arguments', arguments, 'grants', grants) ORDER BY result IS NOT NULL, name COLLATE "C", columns::text COLLATE "C")::text
        FROM object
        """
}

/// The effect of each response of APNs, from the functions that decide it.
private enum ResponseText {
    private static let now = Instant(microseconds: 1_800_000_000_000_000)
    private static let timestamp = #","timestamp":1794000000123"#

    /// Status, reason, and whether the body has a timestamp. Source of the reasons: Apple, "Handling notification responses from APNs".
    private static let responses: [(status: Int32, reasons: [String?], hasTimestamp: Bool)] = [
        (200, [nil], false),
        (400, ["BadDeviceToken", "DeviceTokenNotForTopic", "ExpiredToken"], false),
        (400, ["BadTopic", "MissingTopic", "TopicDisallowed"], false),
        (400, ["MissingDeviceToken", "DuplicateHeaders"], false),
        (
            400,
            [
                "BadCollapseId", "BadExpirationDate", "BadMessageId", "BadPriority", "InvalidPushType", "PayloadEmpty",
                "ANewReason",
            ], false
        ),
        (400, ["IdleTimeout"], false),
        (
            403,
            [
                "BadCertificate", "BadCertificateEnvironment", "ExpiredProviderToken",
                "InvalidProviderToken",
                "MissingProviderToken", "UnrelatedKeyIdInToken", "BadEnvironmentKeyIdInToken",
            ], false
        ),
        (403, ["Forbidden"], false), (404, ["BadPath"], false), (405, ["MethodNotAllowed"], false),
        (410, ["Unregistered", "ExpiredToken", "ANewReason"], true),
        (410, ["Unregistered", "ExpiredToken"], false), (410, [nil], false),
        (413, ["PayloadTooLarge"], false),
        (429, ["TooManyRequests"], false), (429, ["TooManyProviderTokenUpdates"], false),
        (500, ["InternalServerError"], false), (503, ["ServiceUnavailable", "Shutdown"], false),
        (308, [nil], false), (401, [nil], false),
    ]

    static func table() throws -> String {
        var text =
            "| status | reasons | to the token | to the request, when the daemon sends it | what else |\n|---|---|---|---|---|\n"
        for (status, reasons, hasTimestamp) in responses {
            let rows = try reasons.map { try row(status, $0, hasTimestamp) }
            let first = try #require(rows.first)
            #expect(rows.allSatisfy { $0 == first }, "\(status) \(reasons): one row for all")
            let names = reasons.map { $0.map { "`\($0)`" } ?? "none" }.joined(separator: ", ")
            let about = status == 410 ? (hasTimestamp ? ", with a timestamp" : ", without a timestamp") : ""
            text += "| \(status) | \(names)\(about) | \(first) |\n"
        }
        return text
    }

    private static func row(_ status: Int32, _ reason: String?, _ hasTimestamp: Bool) throws -> String {
        let body = reason.map { "{\"reason\":\"\($0)\"\(hasTimestamp ? timestamp : "")}" }
        let result = SendResult(
            topic: "com.example.app", token: "ab", status: String(status), body: body, sentAt: now, queuedAt: now)
        let token =
            switch Interpretation.verdict(on: result) {
            case .accepted: "nothing (accepted)"
            case .stale: "**stale** as of APNs' timestamp"
            case .suspect: "**suspect** as of `sent_at`, behind the guard"
            case .sendersFault: "nothing (sender's fault)"
            case .transient: "nothing (transient)"
            case .unintelligible: "the row is rejected"
            }
        let request = PushRequest(
            address: TokenAddress(
                environment: .production, topic: try #require(Topic("com.example.app")),
                token: try #require(DeviceToken(hex: "ab"))),
            payload: Array("{}".utf8), pushType: .alert, id: "00000000-0000-4000-8000-000000000000")
        let step = RetryPolicy(retryFor: .seconds(86_400)).step(
            after: .answered(
                PushResponse(status: status, body: body, apnsID: status == 200 || reason != nil ? "id" : nil)),
            of: request,
            attempts: 0, firstSentAt: now,
            now: now)
        return "\(token) | \(fate(step.fate)) | \(blame(step.blame))"
    }

    private static func fate(_ fate: RequestFate) -> String {
        switch fate {
        case .answered: "done: the result goes into `send_result`"
        case .failed: "failed: into `failed_send`"
        case .later(let pause, _), .refused(let pause, _): "retried after \(DurationText.text(pause))"
        case .interrupted: "interrupted"
        case .returned: "waits in the outbox"
        }
    }

    private static func blame(_ blame: RetryPolicy.Blame) -> String {
        let pauses = RetryPolicy.Evidence(blame).map { "from \($0.tokens) tokens, while none is accepted" } ?? ""
        return switch blame {
        case .nobody: ""
        case .token: "other requests for the token wait"
        case .message, .topic: "\(pauses): the topic pauses"
        case .foreign: "not a response of APNs; \(pauses): the credential pauses"
        case .sender, .server, .unreachable: "\(pauses): the credential pauses"
        }
    }
}

/// A message that the program logs, found in its sources.
private struct LogMessage: Equatable {
    var text: String
    var level: String
    /// The keys of its metadata.
    var fields: String

    /// All messages, once each, sorted by text. Messages whose whole text varies are left out.
    static func all() throws -> [LogMessage] {
        var found: [LogMessage] = []
        for file in try Sources.all() {
            for message in all(in: file.text) where message.text != "…" {
                if !found.contains(where: { $0.text == message.text && $0.level == message.level }) {
                    found.append(message)
                }
            }
        }
        return found.sorted { $0.text < $1.text }
    }

    static func all(in source: String) -> [LogMessage] {
        let levels = "trace|debug|info|notice|warning|error|critical"
        guard let pattern = try? NSRegularExpression(pattern: "\\blogger\\.(\(levels)|log)\\(") else { return [] }
        return pattern.matches(in: source, range: NSRange(source.startIndex..., in: source)).flatMap { match in
            guard let whole = Range(match.range, in: source), let name = Range(match.range(at: 1), in: source) else {
                return [LogMessage]()
            }
            let call = Call(source[whole.upperBound...])
            let named = call.code.matches(of: /\.(trace|debug|info|notice|warning|error|critical)\b/).map {
                String($0.1)
            }
            let fields = call.fields.isEmpty ? "" : " · " + call.fields.joined(separator: ", ")
            return call.texts.enumerated().map { position, text in
                let level =
                    source[name] != "log"
                    ? String(source[name]) : named.indices.contains(position) ? named[position] : "varies"
                return LogMessage(text: text, level: level, fields: fields)
            }
        }
    }

    /// The arguments of a call: its texts outside brackets, the texts before a colon inside brackets, and the rest.
    private struct Call {
        var texts: [String] = []
        var fields: [String] = []
        var code = ""

        init(_ source: Substring) {
            var rest = source
            var brackets = 0
            var parentheses = 1
            while let character = rest.first, parentheses > 0 {
                rest = rest.dropFirst()
                switch character {
                case "\"":
                    let text = Self.literal(&rest)
                    if brackets == 0 && parentheses == 1 { texts.append(text) }
                    if brackets == 1 && rest.first == ":" { fields.append(text) }
                case "[": brackets += 1
                case "]": brackets -= 1
                case "(": parentheses += 1
                case ")": parentheses -= 1
                default: code.append(character)
                }
            }
        }

        /// Reads to the end of a literal. Interpolations become "…".
        private static func literal(_ rest: inout Substring) -> String {
            var text = ""
            while let character = rest.popFirst(), character != "\"" {
                guard character == "\\" else {
                    text.append(character)
                    continue
                }
                guard let escaped = rest.popFirst() else { break }
                guard escaped == "(" else {
                    text.append(escaped)
                    continue
                }
                text.append("…")
                var depth = 1
                while depth > 0, let inner = rest.popFirst() {
                    switch inner {
                    case "(": depth += 1
                    case ")": depth -= 1
                    case "\"": _ = literal(&rest)
                    default: break
                    }
                }
            }
            return text
        }
    }
}
