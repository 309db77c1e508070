import FoundationEssentials

/// The body of a response, `{"reason": "…", "timestamp": 1508249865488}`, as far as it can be read.
///
/// Apple, "Handling notification responses from APNs": `reason` with every error, `timestamp` only with 410, in
/// milliseconds since the Unix epoch. The code relies on neither: a body that cannot be read says nothing.
struct ResponseBody: Equatable {
    /// The kind of text.
    enum Form: Equatable {
        /// No text, or white space only.
        case missing
        /// A JSON object, as APNs sends.
        case object
        /// One of Apple's reasons without JSON: some clients pass on the reason alone.
        case word
        /// Anything else, such as a proxy's error page. APNs never sends this.
        case foreign
    }

    var form: Form
    /// Nil if it is missing, empty or not a string. At most 100 characters, with control characters replaced.
    var reason: String?
    /// Milliseconds since the Unix epoch, unchecked; nil if it is missing or not an integer.
    var timestamp: Int64?

    /// Reads a body of any content and length.
    ///
    /// If a key is repeated, the first one counts. The timestamp must be an integer, not a string or a fraction.
    /// (`1794000000123.0` and `1.794000000123e12` are integers in JSON.)
    init(_ text: String?) {
        self = text.map { Self.usual($0) ?? Self.decoded($0) } ?? ResponseBody(.missing)
    }

    /// Reads any text.
    static func decoded(_ text: String) -> ResponseBody {
        guard let first = text.utf8.first(where: { !isBlank($0) }) else { return ResponseBody(.missing) }
        if first == UInt8(ascii: "{"), let answer = try? JSONDecoder().decode(Lenient.self, from: Data(text.utf8)) {
            return ResponseBody(.object, reason: answer.reason.flatMap(presentable), timestamp: answer.timestamp)
        }
        return bareReason(text).map { ResponseBody(.word, reason: $0) } ?? ResponseBody(.foreign)
    }

    /// Whether the reason has letters only, as all of Apple's. A gateway's may be a sentence with the path, and so with the device token.
    var isReasonOneWord: Bool { reason.map { $0.utf8.allSatisfy(Self.isLetter) } ?? false }

    private init(_ form: Form, reason: String? = nil, timestamp: Int64? = nil) {
        self.form = form
        self.reason = reason
        self.timestamp = timestamp
    }

    /// The reason in a body that consists of one of Apple's reasons, with or without quotation marks.
    private static func bareReason(_ text: String) -> String? {
        guard text.utf8.count <= 200 else { return nil }
        var word = trimmed(text)
        if let mark = word.first, mark == UInt8(ascii: "\"") || mark == UInt8(ascii: "'"), word.count > 1,
            word.last == mark
        {
            word = word.dropFirst().dropLast()
        }
        let reason = canonical(String(word) ?? "")
        return knownReasons.contains(reason) ? reason : nil
    }

    /// A reason as Apple spells it, from how libraries of other languages do: `badDeviceToken`, `:bad_device_token`,
    /// `Optional("BadDeviceToken")`, `Some(BadDeviceToken)`. Others stay as they are.
    private static func canonical(_ reason: String) -> String {
        if isUsual(reason) { return reason }
        var word = trimmed(reason)
        for (begin, end) in [("Optional(", ")"), ("Optional[", "]"), ("Some(", ")"), ("\"", "\"")]
        where word.count > begin.utf8.count {
            if word.starts(with: begin.utf8), word.suffix(1).elementsEqual(end.utf8) {
                word = word.dropFirst(begin.utf8.count).dropLast()
            }
        }
        guard let text = String(word) else { return reason }
        if knownReasons.contains(text) { return text }
        // Whole words in one of their ways: not any mixture of letters.
        let isOne =
            text.contains("_") || text.first?.isLowercase == true || text.first == ":" || text.uppercased() == text
        return isOne ? knownByLetters[String(text.filter { $0 != ":" && $0 != "_" }.lowercased())] ?? reason : reason
    }

    /// Whether it looks like a word of Apple's: `BadDeviceToken`.
    private static func isUsual(_ reason: String) -> Bool {
        var letters = reason.utf8.makeIterator()
        guard let first = letters.next(), let second = letters.next() else { return true }
        return UInt8(ascii: "A")...UInt8(ascii: "Z") ~= first && UInt8(ascii: "a")...UInt8(ascii: "z") ~= second
            && reason.utf8.allSatisfy(isLetter)
    }

    private static let knownByLetters = Dictionary(uniqueKeysWithValues: knownReasons.map { ($0.lowercased(), $0) })

    static let knownReasons = Set(Reason.table.keys)

    /// The text without blanks around it.
    private static func trimmed(_ text: String) -> Substring.UTF8View {
        var word = Substring(text).utf8.drop(while: isBlank)
        while let last = word.last, isBlank(last) { word.removeLast() }
        return word
    }

    private static func isBlank(_ byte: UInt8) -> Bool { byte == 0x20 || 0x09...0x0d ~= byte }

    /// Reads exactly what APNs writes: `{"reason":"Word"}`, or the same with `,"timestamp":digits`. A JSON decoder takes fifty times
    /// as long, which is a third of the cost of a 410. Nil for anything else.
    static func usual(_ text: String) -> ResponseBody? {
        let body = text.utf8.span
        guard starts(body, with: "{\"reason\":\"", at: 0) else { return nil }
        let start = 11
        var place = start
        while place < body.count, isLetter(body[place]) { place += 1 }
        guard 1...100 ~= place - start else { return nil }
        let word = canonical(String(decoding: text.utf8.dropFirst(start).prefix(place - start), as: UTF8.self))
        var timestamp: Int64?
        if starts(body, with: "\",\"timestamp\":", at: place) {
            place += 14
            let digits = place
            var value: Int64 = 0
            while place < body.count, UInt8(ascii: "0")...UInt8(ascii: "9") ~= body[place] {
                value = value &* 10 &+ Int64(body[place] - UInt8(ascii: "0"))
                place += 1
            }
            // JSON allows no leading zero, and 18 digits fit into an Int64.
            guard 1...18 ~= place - digits, body[digits] != UInt8(ascii: "0") else { return nil }
            timestamp = value
        } else {
            guard starts(body, with: "\"", at: place) else { return nil }
            place += 1
        }
        guard starts(body, with: "}", at: place), place + 1 == body.count else { return nil }
        return ResponseBody(.object, reason: word, timestamp: timestamp)
    }

    private static func starts(_ body: Span<UInt8>, with literal: String, at place: Int) -> Bool {
        let literal = literal.utf8.span
        guard place + literal.count <= body.count else { return false }
        var offset = 0
        while offset < literal.count, body[place + offset] == literal[offset] { offset += 1 }
        return offset == literal.count
    }

    private static func isLetter(_ byte: UInt8) -> Bool {
        UInt8(ascii: "a")...UInt8(ascii: "z") ~= byte | 0x20
    }

    /// Reasons are stored, logged and grouped by: they must be short, and valid in PostgreSQL (no NUL).
    private static func presentable(_ reason: String) -> String? {
        guard !reason.isEmpty else { return nil }
        var text = ""
        for scalar in reason.unicodeScalars.prefix(100) {
            text.unicodeScalars.append(scalar.properties.generalCategory == .control ? "?" : scalar)
        }
        return canonical(text)
    }

    /// Decodes each field separately: a field of the wrong type does not affect the other.
    private struct Lenient: Decodable {
        var reason: String?
        var timestamp: Int64?

        enum Key: CodingKey {
            case reason, timestamp
        }

        init(from decoder: any Decoder) throws {
            let answer = try decoder.container(keyedBy: Key.self)
            reason = try? answer.decode(String.self, forKey: .reason)
            timestamp =
                if let whole = try? answer.decode(Int64.self, forKey: .timestamp) {
                    whole
                } else if let number = try? answer.decode(Double.self, forKey: .timestamp) {
                    Self.whole(number)
                } else {
                    nil
                }
        }

        /// Clamped, so that 1e300 is reported as out of range and not as missing. Nil for a fraction.
        private static func whole(_ value: Double) -> Int64? {
            guard value == value.rounded(.towardZero) else { return nil }
            return Int64(exactly: value) ?? (value > 0 ? .max : .min)
        }
    }
}
