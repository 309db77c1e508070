/// A topic: the `apns-topic` header as it is sent, such as `com.example.app.voip`. 1 to 512 bytes.
///
/// Compared byte by byte, as PostgreSQL does with this column, and not as Swift compares text.
public struct Topic: Sendable {
    public let name: String

    /// The most bytes that are accepted: a bound for the ledger's index, far above any bundle identifier.
    public static let maximumLength = 512

    /// - Returns: Nil for an empty or overlong name.
    public init?(_ name: String) {
        guard (1...Self.maximumLength).contains(name.utf8.count) else { return nil }
        self.name = name
    }
}

extension Topic: Hashable {
    public static func == (left: Topic, right: Topic) -> Bool {
        let (left, right) = (left.name.utf8.span, right.name.utf8.span)
        guard left.count == right.count else { return false }
        var place = 0
        while place < left.count, left[place] == right[place] { place += 1 }
        return place == left.count
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
