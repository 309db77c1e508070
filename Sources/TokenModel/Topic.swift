/// A topic: the `apns-topic` header as it is sent, such as `com.example.app.voip`. 1 to 512 bytes of visible ASCII, and no
/// device token.
///
/// Topics compare byte by byte, as the columns in PostgreSQL do, and not as Swift compares text.
public struct Topic: Sendable {
    public let name: String

    /// The longest topic that is accepted, in bytes: far above any bundle identifier, and short enough for the ledger's index.
    public static let maximumLength = 512

    /// - Returns: Nil for a name that has a fault.
    public init?(_ name: String) {
        guard Self.isTopic(name.utf8.span) else { return nil }
        self.name = name
    }

    /// The rule. The database has the same one for registrations, in `topic_fault`.
    public static func isTopic(_ name: Span<UInt8>) -> Bool {
        guard (1...maximumLength).contains(name.count) else { return false }
        var place = 0
        while place < name.count, visible.contains(name[place]) { place += 1 }
        return place == name.count && !isToken(name)
    }

    /// Whether a name is a device token of 32 bytes or more, in one of the forms that `parse_token` reads: a caller that mixes up its
    /// columns passes one.
    public static func isToken(_ name: Span<UInt8>) -> Bool {
        name.count >= 64 && (DeviceToken(spelled: name).map { $0.bytes.count >= 32 } ?? false)
    }

    private static let visible = UInt8(ascii: "!")...UInt8(ascii: "~")

    /// What is wrong with a text as a topic, and what was expected, in the words of the database: "is missing, …". Nil if nothing.
    ///
    /// It has nothing of the text itself: a sender that mixes up its columns passes a token.
    public static func fault(of name: String) -> String? {
        if isTopic(name.utf8.span) { return nil }
        if name.isEmpty { return "is missing, expected the apns-topic header" }
        if name.utf8.count > maximumLength {
            return "is \(name.utf8.count) bytes long, expected at most \(maximumLength)"
        }
        if isToken(name.utf8.span) { return "is a device token, expected the apns-topic header" }
        let before = name.unicodeScalars.prefix { $0.isASCII && visible.contains(UInt8($0.value)) }
        return
            "has a blank or a character that no header can carry at position \(before.count + 1), expected visible ASCII"
    }
}

extension Topic: Hashable {
    public static func == (left: Topic, right: Topic) -> Bool {
        isSame(left.name.utf8.span, right.name.utf8.span)
    }

    public func hash(into hasher: inout Hasher) {
        for byte in name.utf8 { hasher.combine(byte) }
    }
}

extension Topic: Comparable {
    public static func < (left: Topic, right: Topic) -> Bool {
        precedes(left.name.utf8.span, right.name.utf8.span)
    }
}
