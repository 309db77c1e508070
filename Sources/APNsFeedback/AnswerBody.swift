import FoundationEssentials

/// What could be read from the body of an APNs answer, `{"reason": "…", "timestamp": 1508249865488}`.
///
/// Apple, "Handling notification responses from APNs": `reason` with every error, `timestamp` only with 410, in
/// milliseconds since the Unix epoch. Neither is relied upon: a body that cannot be read is one that says nothing.
struct AnswerBody: Equatable {
    /// Nil when missing, empty or no string. At most 100 characters, control characters replaced.
    var reason: String?
    /// Milliseconds since the Unix epoch, as found, however absurd; nil when missing or no number.
    var timestamp: Int64?

    /// Reads a body of any content and length.
    ///
    /// Where a key stands twice, the first one counts. A timestamp may be written as an integer, as a float (the fraction
    /// is dropped) or as either in a string.
    init(_ text: String?) {
        guard let text, !text.isEmpty else { return }
        self = Self.usual(text) ?? Self.decoded(text)
    }

    /// Whatever JSON it is.
    static func decoded(_ text: String) -> AnswerBody {
        guard let answer = try? JSONDecoder().decode(Lenient.self, from: Data(text.utf8)) else {
            return AnswerBody(reason: nil, timestamp: nil)
        }
        return AnswerBody(reason: answer.reason.flatMap(presentable), timestamp: answer.timestamp)
    }

    private init(reason: String?, timestamp: Int64?) {
        self.reason = reason
        self.timestamp = timestamp
    }

    /// What APNs itself writes, to the byte: `{"reason":"Word"}`, with `,"timestamp":digits` after it or not. A decoder takes
    /// fifty times as long, which is a third of what a 410 costs. Nil for anything else.
    static func usual(_ text: String) -> AnswerBody? {
        let body = text.utf8.span
        guard starts(body, with: "{\"reason\":\"", at: 0) else { return nil }
        let start = 11
        var place = start
        while place < body.count, isLetter(body[place]) { place += 1 }
        guard 1...100 ~= place - start else { return nil }
        let word = String(decoding: text.utf8.dropFirst(start).prefix(place - start), as: UTF8.self)
        var timestamp: Int64?
        if starts(body, with: "\",\"timestamp\":", at: place) {
            place += 14
            let digits = place
            var value: Int64 = 0
            while place < body.count, UInt8(ascii: "0")...UInt8(ascii: "9") ~= body[place] {
                value = value &* 10 &+ Int64(body[place] - UInt8(ascii: "0"))
                place += 1
            }
            // JSON has no number with a zero in front; and 18 digits fit.
            guard 1...18 ~= place - digits, body[digits] != UInt8(ascii: "0") else { return nil }
            timestamp = value
        } else {
            guard starts(body, with: "\"", at: place) else { return nil }
            place += 1
        }
        guard starts(body, with: "}", at: place), place + 1 == body.count else { return nil }
        return AnswerBody(reason: word, timestamp: timestamp)
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

    /// A reason is stored, logged and grouped by: it must be short, and text that PostgreSQL takes (no NUL).
    private static func presentable(_ reason: String) -> String? {
        guard !reason.isEmpty else { return nil }
        var text = ""
        for scalar in reason.unicodeScalars.prefix(100) {
            text.unicodeScalars.append(scalar.properties.generalCategory == .control ? "?" : scalar)
        }
        return text
    }

    /// Each field by itself, so that one of the wrong type does not take the other with it.
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
                } else if let fraction = try? answer.decode(Double.self, forKey: .timestamp) {
                    Self.whole(fraction)
                } else if let text = try? answer.decode(String.self, forKey: .timestamp) {
                    Int64(text) ?? Double(text).flatMap(Self.whole)
                } else {
                    nil
                }
        }

        /// Held at the ends of the range: 1e300 is absurd, and must be found so rather than missing.
        private static func whole(_ value: Double) -> Int64? {
            if value.isNaN { return nil }
            return Int64(exactly: value.rounded(.towardZero)) ?? (value > 0 ? .max : .min)
        }
    }
}
