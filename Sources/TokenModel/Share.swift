/// A part of a whole, in millionths, which are exact where a binary fraction would not be.
public struct Share: Hashable, Comparable, Sendable {
    /// 0 to 1,000,000.
    public let millionths: Int64

    public init(millionths: Int64) {
        self.millionths = millionths
    }

    public static func percent(_ whole: Int64) -> Share { Share(millionths: whole * 10_000) }

    public static func < (left: Share, right: Share) -> Bool { left.millionths < right.millionths }
}

extension Share: LosslessStringConvertible {
    /// Reads a share as people write it: `0.5%`. The `%` is required, so that nobody takes 0.5 for 50 %.
    ///
    /// - Returns: Nil unless the text is a plain number from 0 to 100, with at most four decimal places, followed by `%`.
    public init?(_ text: String) {
        guard text.hasSuffix("%") else { return nil }
        let parts = text.dropLast().split(separator: ".", maxSplits: 1, omittingEmptySubsequences: false)
        let digits = parts.map(String.init)
        guard
            digits.allSatisfy({ !$0.isEmpty && $0.utf8.allSatisfy((UInt8(ascii: "0")...UInt8(ascii: "9")).contains) }),
            let whole = digits.first.flatMap(Int64.init), whole <= 100
        else { return nil }
        let places = digits.count == 2 ? digits[1] : ""
        guard places.count <= 4, let fraction = Int64((places + "0000").prefix(4)) else { return nil }
        self.init(millionths: whole * 10_000 + fraction)
        if millionths > 1_000_000 { return nil }
    }

    /// The shortest text that reads as the same share: `0.5%`, `10%`.
    public var description: String {
        let (whole, fraction) = millionths.quotientAndRemainder(dividingBy: 10_000)
        if fraction == 0 { return "\(whole)%" }
        var places = String(String(fraction + 10_000).dropFirst())
        while places.hasSuffix("0") { places.removeLast() }
        return "\(whole).\(places)%"
    }
}
