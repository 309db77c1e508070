/// Decides which pages behind the cursor a drain looks at again.
///
/// A row can be committed late. A sender that queues little keeps filling the page that it began, or an emptied page, long after
/// other senders have extended the partition. So the rescan keeps the drain complete, and prompt as well.
struct RescanSchedule {
    /// Every turn looks at this many pages before the cursor.
    static let near = 1024

    /// Pages that have been filled again, the latest last: a sender that has filled one will fill more of it.
    private var filled: [Int] = []
    private static let maxFilled = 16

    /// Where the next look at all other pages begins.
    private var page = 0
    /// How many pages that look covers.
    private var window = 4096
    /// The next look is not before this moment.
    private var nextLook: ContinuousClock.Instant?
    private var underway: (range: Range<Int>, since: ContinuousClock.Instant)?

    /// A look should take a millisecond or two, and all looks together a tenth of the time at most.
    private static let target = Duration.milliseconds(1)...Duration.milliseconds(3)
    private static let share = 10

    /// The pages to look at now: those filled again first.
    ///
    /// - Parameter tried: First pages of the ranges tried just now. A row that cannot be taken must not keep others waiting.
    mutating func next(
        before point: Int, except tried: Set<Int> = [], now: ContinuousClock.Instant
    ) -> [Range<Int>] {
        let end = point - Self.near
        let known = filled.filter {
            $0 < end && !tried.contains($0 / Partition.pagesPerRange * Partition.pagesPerRange)
        }
        .map { $0..<$0 + 1 }
        underway = nil
        guard end > 0, nextLook.map({ now >= $0 }) ?? true else { return known }
        if page >= end { page = 0 }
        let range = page..<min(page + window, end)
        underway = (range, now)
        return known + [range]
    }

    /// Takes the result of a look. The next look begins behind the page found, so that a row that cannot be taken is not found
    /// again and again.
    mutating func looked(foundAt found: Int?, now: ContinuousClock.Instant) {
        if let found { note(found, before: found + 1) }
        guard let (range, since) = underway else { return }
        let took = since.duration(to: now)
        if let found, !range.contains(found) { return }
        page = found.map { ($0 / Partition.pagesPerRange + 1) * Partition.pagesPerRange } ?? range.upperBound
        if found == nil, range.count == window {
            if took < Self.target.lowerBound { window = min(window * 2, 1 << 16) }
            if took > Self.target.upperBound { window = max(window / 2, 256) }
        }
        nextLook = now + took * Self.share
    }

    /// A row was found on a page. If the page lies before the point, it has been filled again.
    mutating func note(_ found: Int, before point: Int) {
        guard found < point else { return }
        filled.removeAll { $0 == found }
        filled.append(found)
        if filled.count > Self.maxFilled { filled.removeFirst() }
    }
}
