/// How many rows of an attached table one statement reads. If an expression fails for a row, the database halves the page until it can skip that row. So
/// pages stay short near such rows.
package struct PageSize {
    package private(set) var value: Int
    private let most: Int

    package init(most: Int) { (value, self.most) = (most, most) }

    /// Notes how many rows the last page had.
    package mutating func took(_ rows: Int64) { value = min(max(Int(rows) * 2, 16), most) }
}
