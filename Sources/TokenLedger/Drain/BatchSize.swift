/// How many pages a batch of a partition takes: fewer while the ledger comes from a slow disk. A batch keeps its tokens locked until it
/// commits, and an application that registers one of them waits for that long.
struct BatchSize {
    private var size = SliceSize(Partition.pagesPerRange / 8, in: 1...Partition.pagesPerRange)

    /// With fewer rows on each page, a batch says nothing about how long the next one takes, unless it was slow itself.
    private static let rowsThatTell = 4

    var pages: Int { size.value }

    /// - Parameters:
    ///   - pages: How many it has taken: fewer than its size at the end of a range.
    ///   - rows: How many it has recorded.
    mutating func took(_ time: Duration, for pages: Int, rows: Int) {
        if rows >= pages * Self.rowsThatTell || time > .seconds(1) { size.took(time, for: pages) }
    }
}
