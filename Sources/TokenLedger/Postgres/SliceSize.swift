/// How much one statement reads or a batch takes, in rows or pages: more while they are quick, less once they are slow. How much can be
/// read in a time depends on the disk and the cache, and nobody should have to configure that.
struct SliceSize {
    private(set) var value: Int
    private let range: ClosedRange<Int>

    /// - Parameter value: Where to begin.
    init(_ value: Int, in range: ClosedRange<Int>) {
        self.value = min(max(value, range.lowerBound), range.upperBound)
        self.range = range
    }

    /// Notes how long a statement took. None should take longer than a second, and the next slice may lie on the disk.
    ///
    /// - Parameter size: How much it has read; nil if it was all that it might.
    mutating func took(_ time: Duration, for size: Int? = nil) {
        let size = min(size ?? value, value)
        if time < .milliseconds(200), size == value { value = min(value * 2, range.upperBound) }
        if time > .seconds(1) { value = max(Int(Double(size) * (.milliseconds(500) / time)), range.lowerBound) }
    }

    /// Notes that a statement ran into its time limit.
    ///
    /// - Returns: False when a slice cannot be any smaller.
    mutating func timedOut() -> Bool {
        if value == range.lowerBound { return false }
        value = max(value / 8, range.lowerBound)
        return true
    }
}
