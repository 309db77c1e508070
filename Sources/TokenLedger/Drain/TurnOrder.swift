/// Decides which partition of a queue has the next turn within a pass. Pure.
///
/// The partitions have their turns in rounds until they are drained. Every round begins with the current partition: new rows do not wait for
/// a backlog.
struct TurnOrder {
    let current: Partition
    /// The other partitions that may have rows.
    private(set) var others: [Partition]
    /// What is left of this round.
    private var round: [Partition] = []
    private var isCurrentFinished: Bool

    /// - Parameter sizes: As of the beginning of the pass. If the current partition has no page yet, there is no row to look for.
    init(_ sizes: PartitionSizes) {
        current = sizes.current
        others = sizes.othersToVisit
        isCurrentFinished = sizes.pages(of: sizes.current) == 0
    }

    /// Whether all partitions are drained, as far as this pass has looked.
    var isFinished: Bool { round.isEmpty && isCurrentFinished && others.isEmpty }

    /// Begins a turn. After the last one, this is the current partition again: rows may have come in the meantime.
    mutating func next() -> Partition {
        if round.isEmpty {
            round = [current] + others
            isCurrentFinished = false
        }
        return round.removeFirst()
    }

    /// Takes the end of a turn.
    ///
    /// - Parameter hasReadInBulk: Whether the turn has moved rows to the backlog.
    mutating func ended(_ partition: Partition, isDrained: Bool, hasReadInBulk: Bool) {
        if isDrained {
            if partition == current { isCurrentFinished = true }
            others.removeAll { $0 == partition }
        }
        guard hasReadInBulk, let backlog = partition.queue.backlog else { return }
        // The current partition has waited: begin the next round.
        round = []
        if !others.contains(backlog) { others.append(backlog) }
    }
}
