internal import TOMLKit

/// The configuration file, in TOML: sections and keys of the table of settings, and no others.
///
/// TOMLKit reads it; its values do not say on which line they stood, so that is found beside it.
struct ConfigurationFile {
    struct Entry: Equatable {
        var key: String
        /// As the table of settings takes it: a text without its quotes, a number in digits.
        var value: String
        /// True where the file has a text, false where it has a number; nil for anything else.
        var isText: Bool?
        /// Nil where it could not be told.
        var line: Int?
    }

    let entries: [Entry]

    /// - Throws: `ConfigurationError` with line and column when it is no TOML.
    init(text: String, name: String) throws(ConfigurationError) {
        let table: TOMLTable
        do {
            table = try TOMLTable(string: text)
        } catch let error as TOMLParseError {
            throw ConfigurationError([
                "\(name):\(error.source.begin.line):\(error.source.begin.column): \(error.description)"
            ])
        } catch {
            throw ConfigurationError(["\(name): \(error)"])
        }
        let lines = Self.linesOfKeys(text)
        entries = Self.flatten(table, under: "").map { entry in
            var entry = entry
            entry.line = lines[entry.key]
            return entry
        }.sorted { ($0.line ?? 0, $0.key) < ($1.line ?? 0, $1.key) }
    }

    private static func flatten(_ table: TOMLTable, under prefix: String) -> [Entry] {
        table.keys.flatMap { name -> [Entry] in
            let key = prefix + name
            guard let value = table[name] else { return [] }
            if let section = value.table {
                // A section in which everything is commented out.
                if section.isEmpty,
                    Setting.table.contains(where: { $0.key.hasPrefix(key + ".") }) || key == "credential"
                {
                    return []
                }
                return section.isEmpty ? [Entry(key: key, value: "a section")] : flatten(section, under: key + ".")
            }
            if let text = value.string { return [Entry(key: key, value: text, isText: true)] }
            if let number = value.int { return [Entry(key: key, value: String(number), isText: false)] }
            return [Entry(key: key, value: value.debugDescription)]
        }
    }

    /// The line on which each key stands. Good for files as people write them; a key that it misses has no line.
    private static func linesOfKeys(_ text: String) -> [String: Int] {
        var lines: [String: Int] = [:]
        var section = ""
        // isNewline, because Swift takes \r\n for one character; and some editors begin with a byte order mark.
        for (number, line) in text.split(omittingEmptySubsequences: false, whereSeparator: \.isNewline).enumerated() {
            let line = line.filter { !" \t\"'\u{FEFF}".contains($0) }
            if line.hasPrefix("["), let end = line.firstIndex(of: "]") {
                section = line[..<end].drop { $0 == "[" } + "."
                lines[String(section.dropLast())] = number + 1
            } else if let equals = line.firstIndex(of: "="), !line.hasPrefix("#") {
                lines[section + line[..<equals]] = number + 1
            }
        }
        return lines
    }
}
