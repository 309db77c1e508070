/// A document in a strict subset of TOML 1.0: comments, tables ("sections"), keys, single-line strings ("texts"), decimal
/// integers, booleans and arrays of strings. Everything else is refused. Every accepted document means the same in TOML.
///
/// https://toml.io/en/v1.0.0
struct TOMLDocument: Equatable {
    enum Value: Equatable {
        case text(String)
        case integer(Int64)
        case boolean(Bool)
        case texts([String])
    }

    struct Entry: Equatable {
        /// Starts with the parts of its section.
        var key: [String]
        var value: Value
        /// From 1.
        var line: Int
    }

    struct Section: Equatable {
        var key: [String]
        /// From 1.
        var line: Int
    }

    /// The most keys and sections. There are some forty settings, and eight more for each credential.
    static let maximumKeys = 10_000

    /// In the order of the text.
    private(set) var entries: [Entry] = []
    private(set) var sections: [Section] = []

    /// How a key was defined. TOML does not allow a key to be defined twice, or a section to be extended from outside.
    private enum Definition {
        case value
        /// By its own header.
        case section
        /// By the header of a section inside it. Its own header may still follow.
        case implied
        /// By a key with dots.
        case dotted
    }

    private static let values = "a text in quotes, a whole number, true, false or an array of texts"

    /// - Throws: The first mistake.
    init(_ bytes: [UInt8]) throws(TOMLError) {
        var scanner = try TOMLScanner(bytes)
        var known: [[String]: Definition] = [:]
        var section: [String] = []
        while true {
            try scanner.skipLines()
            guard scanner.next != nil else { return }
            let line = scanner.line
            let start = scanner.offset
            if entries.count + sections.count == Self.maximumKeys {
                throw scanner.failure(found: "more than \(Self.maximumKeys) keys and sections", expected: "fewer")
            }
            if scanner.take("[") {
                section = try scanner.key()
                guard scanner.take("]") else { throw scanner.failure(expected: "] or a dot") }
                if let other = Self.define(section: section, in: &known) {
                    throw scanner.failure(found: other, expected: "a new section", at: start)
                }
                sections.append(Section(key: section, line: line))
            } else {
                let key = try scanner.key()
                guard scanner.take("=") else { throw scanner.failure(expected: "= or a dot") }
                if let other = Self.define(key: key, of: section, in: &known) {
                    throw scanner.failure(found: other, expected: "a new key", at: start)
                }
                scanner.skipBlanks()
                entries.append(Entry(key: section + key, value: try Self.value(&scanner), line: line))
            }
            try scanner.skipComment()
            guard scanner.next == nil || scanner.takeNewline() else {
                throw scanner.failure(expected: "the end of the line or a comment")
            }
        }
    }

    private static func name(_ key: [String]) -> String { String(key.joined(separator: ".").prefix(60)) }

    /// - Returns: In words, what is in the way; nil when nothing is.
    private static func define(section: [String], in known: inout [[String]: Definition]) -> String? {
        for count in 1..<section.count {
            let outer = Array(section.prefix(count))
            if known[outer] == .value { return "a section inside a value" }
            known[outer] = known[outer] ?? .implied
        }
        switch known[section] {
        case nil, .implied: break
        case .section: return "the section [\(name(section))] for the second time"
        case .value, .dotted: return "a section named like a key before it"
        }
        known[section] = .section
        return nil
    }

    /// - Returns: In words, what is in the way; nil when nothing is.
    private static func define(key: [String], of section: [String], in known: inout [[String]: Definition]) -> String? {
        for count in 1..<key.count {
            let outer = section + key.prefix(count)
            switch known[outer] {
            case nil, .dotted: break
            case .value: return "a key inside a value"
            case .section, .implied: return "a key of a section that has a header of its own"
            }
            known[outer] = .dotted
        }
        guard known[section + key] == nil else { return "the key \(name(section + key)) for the second time" }
        known[section + key] = .value
        return nil
    }

    private static func value(_ scanner: inout TOMLScanner) throws(TOMLError) -> Value {
        switch scanner.next {
        case UInt8(ascii: "\""), UInt8(ascii: "'"): return .text(try scanner.quoted())
        case UInt8(ascii: "["): return .texts(try texts(&scanner))
        case UInt8(ascii: "{"): throw scanner.failure(found: "an inline table", expected: values)
        default: break
        }
        let start = scanner.offset
        let unread = scanner
        let word = scanner.bareWord { TOMLScanner.isBare($0) || ".:+".utf8.contains($0) }
        if word == "true" || word == "false" { return .boolean(word == "true") }
        guard let first = word.utf8.first, "+-0123456789".utf8.contains(first) else {
            throw unread.failure(expected: values)
        }
        if let number = integer(word) { return .integer(number) }
        throw scanner.failure(
            found: "a number that is not a whole decimal one of 64 bits, or a date", expected: values, at: start)
    }

    /// An optional sign and digits without leading zeros. Single underscores may separate digits.
    private static func integer(_ word: String) -> Int64? {
        let unsigned = word.first == "+" || word.first == "-" ? word.dropFirst() : word[...]
        let groups = unsigned.split(separator: "_", omittingEmptySubsequences: false)
        let areDigits = groups.allSatisfy { group in
            !group.isEmpty && group.utf8.allSatisfy((UInt8(ascii: "0")...UInt8(ascii: "9")).contains)
        }
        guard areDigits, unsigned == "0" || unsigned.first != "0" else { return nil }
        return Int64(word.filter { $0 != "_" })
    }

    private static func texts(_ scanner: inout TOMLScanner) throws(TOMLError) -> [String] {
        _ = scanner.take("[")
        var texts: [String] = []
        repeat {
            try scanner.skipLines()
            if scanner.take("]") { return texts }
            texts.append(try scanner.quoted())
            try scanner.skipLines()
        } while scanner.take(",")
        guard scanner.take("]") else { throw scanner.failure(expected: "a comma or ]") }
        return texts
    }
}
