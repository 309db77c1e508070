/// How much one statement of a sweep reads, in rows or pages: more while statements are quick, less once they are slow. How much
/// a statement can read in its time depends on the disk and the cache, and nobody should have to configure that.
struct SliceSize {
    private(set) var value: Int
    private let range: ClosedRange<Int>

    /// - Parameter value: Where to begin.
    init(_ value: Int, in range: ClosedRange<Int>) {
        self.value = min(max(value, range.lowerBound), range.upperBound)
        self.range = range
    }

    /// Notes how long a statement took. None should take longer than a second, and the next slice may lie on the disk.
    mutating func took(_ time: Duration) {
        if time < .milliseconds(200) { value = min(value * 2, range.upperBound) }
        if time > .seconds(1) { value = max(Int(Double(value) * (.milliseconds(500) / time)), range.lowerBound) }
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
