/// The entries of the configuration file, in order, with the sections joined to the keys.
struct ConfigurationFile {
    struct Entry: Equatable {
        /// The key with its section: `sweep.interval`. A part that TOML requires to be quoted stays in quotes, so it matches no setting.
        var key: String
        /// Nil for an empty section.
        var value: TOMLDocument.Value?
        var line: Int
    }

    /// In the order of the file.
    let entries: [Entry]

    /// - Throws: A problem with line and column, if the text is not in the supported subset of TOML.
    init(_ contents: [UInt8], name: String) throws(ConfigurationError) {
        let document: TOMLDocument
        do {
            document = try TOMLDocument(contents)
        } catch {
            throw ConfigurationError(["\(name):\(error)"])
        }
        var outer: Set<[String]> = []
        for key in document.entries.map(\.key) + document.sections.map(\.key) {
            for count in 1..<key.count { outer.insert(Array(key.prefix(count))) }
        }
        // A section may have all its settings commented out.
        let empty = document.sections.filter { !outer.contains($0.key) && !Self.isOfSettings(Self.text($0.key)) }
        entries =
            (document.entries.map { Entry(key: Self.text($0.key), value: $0.value, line: $0.line) }
            + empty.map { Entry(key: Self.text($0.key), value: nil, line: $0.line) })
            .sorted { $0.line < $1.line }
    }

    private static func isOfSettings(_ section: String) -> Bool {
        section == "credential" || Setting.table.contains { $0.key.hasPrefix(section + ".") }
    }

    private static func text(_ key: [String]) -> String {
        key.map { part in
            !part.isEmpty && part.utf8.allSatisfy(TOMLScanner.isBare) ? part : "\"\(part)\""
        }.joined(separator: ".")
    }
}
