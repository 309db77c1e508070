/// A version of tokenkeeperd, `major.minor.patch`.
public struct Version: Hashable, Comparable, Sendable, CustomStringConvertible {
    public let parts: [Int]

    public init(major: Int, minor: Int, patch: Int) {
        parts = [major, minor, patch]
    }

    /// - Returns: Nil unless the text is three whole numbers with dots between.
    public init?(_ text: some StringProtocol) {
        let parts = text.split(separator: ".", omittingEmptySubsequences: false).map { Int($0) ?? -1 }
        guard parts.count == 3, parts.allSatisfy({ $0 >= 0 }) else { return nil }
        self.parts = parts
    }

    public static func < (left: Version, right: Version) -> Bool {
        left.parts.lexicographicallyPrecedes(right.parts)
    }

    public var description: String { parts.map(String.init).joined(separator: ".") }
}
