/// A device token as a person has it at hand: whole, or its beginning. 8 to 1024 hex digits, kept in lower case.
///
/// Logs show the first 8 digits. Fewer would fit too many tokens to be of use.
public struct TokenDigits: Equatable, Sendable {
    /// Lower case.
    public let text: String

    /// As many as a log shows, and never more of a token where the whole was not asked for.
    public static let shown = 8

    /// The digits of the longest token, 512 bytes.
    static let most = 1024

    /// - Returns: Nil unless the text is 8 to 1024 hex digits, in either case, and nothing else.
    public init?(_ text: String) {
        let lower = text.lowercased()
        guard (Self.shown...Self.most).contains(lower.utf8.count),
            lower.utf8.allSatisfy({
                ("0"..."9").contains(Unicode.Scalar($0)) || ("a"..."f").contains(Unicode.Scalar($0))
            })
        else { return nil }
        self.text = lower
    }

    /// Whether it can be a whole token: a token is whole bytes.
    public var canBeWhole: Bool { text.utf8.count.isMultiple(of: 2) }

    /// The keys of all tokens that begin so, both ends included, in hex.
    ///
    /// No key is longer than 512 bytes, so the last one possible is the digits and then f up to there; a digit that is half a byte
    /// is made whole by the padding.
    var keys: (first: String, last: String) {
        let padding = String(repeating: "f", count: Self.most - text.utf8.count)
        return (canBeWhole ? text : text + "0", text + padding)
    }
}
