internal import FoundationEssentials

/// What `--json` prints: one text, keys in snake case and in alphabetical order, instants in UTC.
enum JSONOutput {
    /// An array with an element per line.
    static func array(_ elements: [some Encodable]) throws -> String {
        var lines: [String] = []
        for element in elements { lines.append(try text(element)) }
        return "[" + lines.joined(separator: ",\n ") + "]"
    }

    /// An instant of SQL's `inUTC`, in ISO 8601.
    static func instant(_ text: String) -> String {
        let parts = text.split(separator: " ")
        return parts.count == 3 && parts[2] == "UTC" ? "\(parts[0])T\(parts[1])Z" : text
    }

    static func text(_ value: some Encodable) throws -> String {
        let encoder = JSONEncoder()
        encoder.keyEncodingStrategy = .convertToSnakeCase
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        return String(decoding: try encoder.encode(value), as: UTF8.self)
    }
}
