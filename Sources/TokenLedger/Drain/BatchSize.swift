internal import Synchronization

/// How many pages of a queue a batch takes: fewer while the ledger comes from a slow disk. A batch keeps its tokens locked until it
/// commits, and an application that registers one of them waits for that long.
final class BatchSize: Sendable {
    private let pages = Mutex(SliceSize(Partition.pagesPerRange / 16, in: 1...Partition.pagesPerRange))

    /// The parts of a range, each for one batch.
    func parts(of range: Range<Int>) -> [Range<Int>] {
        let size = pages.withLock(\.value)
        return stride(from: range.lowerBound, to: range.upperBound, by: size).map {
            $0..<min($0 + size, range.upperBound)
        }
    }

    /// Notes how long a batch took.
    func took(_ time: Duration) { pages.withLock { $0.took(time) } }
}
