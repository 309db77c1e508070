/// A topic: the `apns-topic` header as it is sent, such as `com.example.app.voip`. 1 to 512 bytes.
///
/// Topics compare byte by byte, as the columns in PostgreSQL do, and not as Swift compares text.
public struct Topic: Sendable {
    public let name: String

    /// The longest topic that is accepted, in bytes: far above any bundle identifier, and short enough for the ledger's index.
    public static let maximumLength = 512

    /// - Returns: Nil for an empty or overlong name.
    public init?(_ name: String) {
        guard (1...Self.maximumLength).contains(name.utf8.count) else { return nil }
        self.name = name
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
