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
        guard let text, !text.isEmpty, let answer = try? JSONDecoder().decode(Lenient.self, from: Data(text.utf8))
        else {
            return
        }
        reason = answer.reason.flatMap(Self.presentable)
        timestamp = answer.timestamp
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
