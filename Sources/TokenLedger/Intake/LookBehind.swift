/// Where to look for rows behind the point up to which a leaf was drained.
///
/// A row can be committed late. And a sender that queues little goes on filling the page it has begun, or one that has been emptied,
/// while others have long extended the leaf: so this is not for the sake of completeness alone, but of freshness.
struct LookBehind {
    /// So many pages behind the point are looked at every time: some seconds of a busy queue.
    static let near = 1024

    /// Where the next look at what lies further back begins.
    private var page = 0
    /// How many pages it takes in.
    private var window = 4096
    private var again: ContinuousClock.Instant?
    private var under: (range: Range<Int>, since: ContinuousClock.Instant)?

    /// A look shall take a millisecond or two, and looks a tenth of the time at most.
    private static let wanted = Duration.milliseconds(1)...Duration.milliseconds(3)
    private static let share = 10

    /// The pages to look at now; nil when it is not time yet, or when nothing lies so far back.
    mutating func next(before point: Int, now: ContinuousClock.Instant) -> Range<Int>? {
        let end = point - Self.near
        guard end > 0, again.map({ now >= $0 }) ?? true else { return nil }
        if page >= end { page = 0 }
        let range = page..<min(page + window, end)
        under = (range, now)
        return range
    }

    /// What the look has found: the next one begins behind it, so that a row that cannot be had is not found for ever.
    mutating func looked(foundAt found: Int?, now: ContinuousClock.Instant) {
        guard let (range, since) = under else { return }
        let took = since.duration(to: now)
        page = found.map { ($0 / Leaf.pagesPerRange + 1) * Leaf.pagesPerRange } ?? range.upperBound
        if found == nil, range.count == window {
            if took < Self.wanted.lowerBound { window = min(window * 2, 1 << 16) }
            if took > Self.wanted.upperBound { window = max(window / 2, 256) }
        }
        again = now + took * Self.share
    }
}
