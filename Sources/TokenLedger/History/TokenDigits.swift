internal import TokenModel

/// A device token as a person enters it: whole, in any form that `tokenkeeper.parse_token` reads, or its first digits. 8 to 1024 hex
/// digits, kept in lower case.
///
/// Logs show the first 8 digits. Fewer digits would match too many tokens to be useful.
public struct TokenDigits: Equatable, Sendable {
    /// Lower case.
    public let text: String

    /// How many digits of a token are shown in logs, and wherever the whole token was not requested.
    public static let shown = 8

    /// The digits of the longest token: 512 bytes.
    static let most = 1024

    /// - Returns: Nil unless the text has 8 to 1024 hex digits, in either case.
    public init?(_ text: String) {
        // An odd number of digits is the beginning of a token.
        let lower = DeviceToken(spelled: text)?.hex ?? text.lowercased()
        guard (Self.shown...Self.most).contains(lower.utf8.count),
            lower.utf8.allSatisfy({
                ("0"..."9").contains(Unicode.Scalar($0)) || ("a"..."f").contains(Unicode.Scalar($0))
            })
        else { return nil }
        self.text = lower
    }

    /// Whether it can be a whole token: an even number of digits.
    public var canBeWhole: Bool { text.utf8.count.isMultiple(of: 2) }

    /// The first and the last key of all tokens that begin with these digits, in hex.
    ///
    /// No key is longer than 512 bytes, so the last possible key is the digits padded with f to that length. The padding also completes
    /// a half byte.
    var keys: (first: String, last: String) {
        let padding = String(repeating: "f", count: Self.most - text.utf8.count)
        return (canBeWhole ? text : text + "0", text + padding)
    }
}
