/// Reads the tokens of TOML from bytes, and knows the line and column of each byte.
///
/// Nothing here recurses, each byte is read a bounded number of times, and the sizes of the document, of keys and of texts are
/// limited. `TOMLDocument` limits the number of keys. So no document can crash or delay the process.
struct TOMLScanner {
    /// The most bytes of a document.
    static let maximumSize = 1 << 20
    /// The most parts of a key: the settings need three.
    static let maximumKeyParts = 8
    /// The most bytes of a part of a key. The longest are the names of credentials, 40 bytes.
    static let maximumKeyPart = 100
    /// The most bytes of a text in quotes.
    static let maximumText = 16 << 10

    private let bytes: [UInt8]
    private(set) var offset = 0
    private(set) var line = 1
    private var lineStart = 0

    /// - Throws: If the text is too long or not UTF-8, with the position of the first wrong byte.
    init(_ bytes: [UInt8]) throws(TOMLError) {
        self.bytes = bytes
        if bytes.count > Self.maximumSize {
            throw failure(found: "a file of more than 1 MiB", expected: "a smaller one")
        }
        if let invalid = Self.firstInvalidByte(in: bytes) {
            while offset < invalid { if !takeNewline() { offset += 1 } }
            throw failure(found: "a byte that is not UTF-8", expected: "a text in UTF-8")
        }
    }

    private static func firstInvalidByte(in bytes: [UInt8]) -> Int? {
        // The fast path for valid text.
        if String(validating: bytes, as: UTF8.self) != nil { return nil }
        var parser = Unicode.UTF8.ForwardParser()
        var iterator = bytes.makeIterator()
        var offset = 0
        while true {
            switch parser.parseScalar(from: &iterator) {
            case .valid(let scalar): offset += scalar.count
            case .emptyInput: return nil
            case .error: return offset
            }
        }
    }

    /// Nil at the end of the text.
    var next: UInt8? { offset < bytes.count ? bytes[offset] : nil }

    mutating func take(_ character: Character) -> Bool {
        guard next == character.asciiValue else { return false }
        offset += 1
        return true
    }

    mutating func skipBlanks() {
        while let byte = next, byte == UInt8(ascii: " ") || byte == UInt8(ascii: "\t") { offset += 1 }
    }

    /// A line feed, or a carriage return and a line feed.
    mutating func takeNewline() -> Bool {
        var length = 1
        if next == 0x0D, offset + 1 < bytes.count { length = 2 }
        guard offset < bytes.count, bytes[offset + length - 1] == 0x0A else { return false }
        offset += length
        line += 1
        lineStart = offset
        return true
    }

    /// Skips blanks and a comment.
    mutating func skipComment() throws(TOMLError) {
        skipBlanks()
        guard take("#") else { return }
        while let byte = next, !isNewline {
            guard Self.isText(byte) else { throw failure(expected: "a comment without control characters") }
            offset += 1
        }
    }

    /// Skips blanks, comments and line ends.
    mutating func skipLines() throws(TOMLError) {
        repeat { try skipComment() } while takeNewline()
    }

    /// Reads a key: parts separated by dots, bare or in quotes.
    mutating func key() throws(TOMLError) -> [String] {
        let start = offset
        var parts: [String] = []
        repeat {
            skipBlanks()
            if parts.count == Self.maximumKeyParts {
                throw failure(
                    found: "a key of more than \(Self.maximumKeyParts) parts", expected: "a setting's key", at: start)
            }
            let startOfPart = offset
            let part: String
            if next == UInt8(ascii: "\"") || next == UInt8(ascii: "'") {
                part = try quoted()
            } else {
                part = bareWord(Self.isBare)
                if part.isEmpty { throw failure(expected: "a key") }
            }
            if part.utf8.count > Self.maximumKeyPart {
                throw failure(
                    found: "a part of a key of more than \(Self.maximumKeyPart) bytes", expected: "a setting's key",
                    at: startOfPart)
            }
            parts.append(part)
            skipBlanks()
        } while take(".")
        return parts
    }

    /// Reads the longest run of such ASCII characters, which may be empty.
    mutating func bareWord(_ isPart: (UInt8) -> Bool) -> String {
        let start = offset
        while let byte = next, isPart(byte) { offset += 1 }
        return String(decoding: bytes[start..<offset], as: UTF8.self)
    }

    static func isBare(_ byte: UInt8) -> Bool {
        switch byte {
        case UInt8(ascii: "a")...UInt8(ascii: "z"), UInt8(ascii: "A")...UInt8(ascii: "Z"): true
        case UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "_"), UInt8(ascii: "-"): true
        default: false
        }
    }

    /// Reads a text on one line: in `"` with escapes, or in `'` without.
    mutating func quoted() throws(TOMLError) -> String {
        let start = offset
        guard let quote = next, quote == UInt8(ascii: "\"") || quote == UInt8(ascii: "'") else {
            throw failure(expected: "a text in quotes")
        }
        if bytes[offset...].prefix(3).elementsEqual([quote, quote, quote]) {
            throw failure(found: "a text over several lines", expected: "a text in one pair of quotes")
        }
        offset += 1
        var text: [UInt8] = []
        while let byte = next, byte != quote {
            guard Self.isText(byte) else {
                throw failure(expected: "the text to end with \(UnicodeScalar(quote)) on its line")
            }
            if text.count > Self.maximumText { break }
            if byte == UInt8(ascii: "\\"), quote == UInt8(ascii: "\"") {
                text += try escape()
            } else {
                text.append(byte)
                offset += 1
            }
        }
        if text.count > Self.maximumText {
            throw failure(found: "a text of more than 16 KiB", expected: "a shorter one", at: start)
        }
        guard next == quote else {
            throw failure(expected: "the text from column \(column(of: start)) to end with \(UnicodeScalar(quote))")
        }
        offset += 1
        return String(decoding: text, as: UTF8.self)
    }

    private mutating func escape() throws(TOMLError) -> [UInt8] {
        let start = offset
        offset += 1
        guard let byte = next else { throw failure(expected: "the rest of an escape") }
        offset += 1
        let count: Int
        switch byte {
        case UInt8(ascii: "b"): return [0x08]
        case UInt8(ascii: "t"): return [0x09]
        case UInt8(ascii: "n"): return [0x0A]
        case UInt8(ascii: "f"): return [0x0C]
        case UInt8(ascii: "r"): return [0x0D]
        case UInt8(ascii: "\""), UInt8(ascii: "\\"): return [byte]
        case UInt8(ascii: "u"): count = 4
        case UInt8(ascii: "U"): count = 8
        default:
            throw failure(
                found: "an unknown escape", expected: #"\b, \t, \n, \f, \r, \", \\, \uXXXX or \UXXXXXXXX"#, at: start)
        }
        var value: UInt32 = 0
        for _ in 0..<count {
            guard let digit = next.flatMap({ Character(UnicodeScalar($0)).hexDigitValue }), let byte = next, byte < 0x80
            else { throw failure(expected: "\(count) hexadecimal digits") }
            value = value << 4 | UInt32(digit)
            offset += 1
        }
        guard let scalar = UnicodeScalar(value) else {
            throw failure(found: "an escape that is not a character", expected: "a Unicode scalar value", at: start)
        }
        return Array(String(Character(scalar)).utf8)
    }

    private var isNewline: Bool {
        next == 0x0A || (next == 0x0D && offset + 1 < bytes.count && bytes[offset + 1] == 0x0A)
    }

    /// Whether a byte may appear in text: no control character except the tab.
    private static func isText(_ byte: UInt8) -> Bool { byte == 0x09 || (byte >= 0x20 && byte != 0x7F) }

    /// In the line that is being read.
    private func column(of offset: Int) -> Int {
        1 + bytes[min(lineStart, offset)..<offset].count { $0 & 0xC0 != 0x80 }
    }

    /// - Parameters:
    ///   - found: Nil for the next character.
    ///   - place: In the line that is being read; nil for the next character.
    func failure(found: String? = nil, expected: String, at place: Int? = nil) -> TOMLError {
        TOMLError(line: line, column: column(of: place ?? offset), found: found ?? nextInWords, expected: expected)
    }

    private var nextInWords: String {
        if offset >= bytes.count { return "the end of the file" }
        if isNewline { return "the end of the line" }
        guard let scalar = String(decoding: bytes[offset...].prefix(4), as: UTF8.self).unicodeScalars.first else {
            return "nothing"
        }
        if scalar == "\u{FEFF}" { return "a byte order mark" }
        switch scalar.properties.generalCategory {
        case .control, .format, .lineSeparator, .paragraphSeparator, .privateUse, .unassigned, .nonspacingMark,
            .enclosingMark:
            let digits = String(scalar.value, radix: 16, uppercase: true)
            return "U+" + String(repeating: "0", count: max(0, 4 - digits.count)) + digits
        case .spaceSeparator: return scalar == " " ? "a blank" : "a blank that is not ASCII"
        default: return "'\(scalar)'"
        }
    }
}
