internal import TokenLedger

/// Shares as people write them: percent, with `%`, so that 0.5 and 50 % are never taken for each other.
enum ShareText {
    /// - Returns: Nil for anything but a plain number from 0 to 100, of at most four decimal places, and `%`.
    static func share(_ text: String) -> Share? {
        guard text.hasSuffix("%") else { return nil }
        let parts = text.dropLast().split(separator: ".", maxSplits: 1, omittingEmptySubsequences: false)
        let digits = parts.map(String.init)
        guard
            digits.allSatisfy({ !$0.isEmpty && $0.utf8.allSatisfy((UInt8(ascii: "0")...UInt8(ascii: "9")).contains) }),
            let whole = digits.first.flatMap(Int64.init), whole <= 100
        else { return nil }
        let places = digits.count == 2 ? digits[1] : ""
        guard places.count <= 4, let fraction = Int64((places + "0000").prefix(4)) else { return nil }
        let share = Share(millionths: whole * 10_000 + fraction)
        return share.millionths <= 1_000_000 ? share : nil
    }
}
