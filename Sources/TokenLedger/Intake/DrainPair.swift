internal import Dispatch
internal import Synchronization

/// What two drains of one process have in common.
public final class DrainPair: Sendable {
    private let guardTurn = DispatchSemaphore(value: 1)
    private let isOverdue = Atomic(false)
    private let reading = Atomic(false)
    private let helpedUntil: Mutex<[Leaf: ContinuousClock.Instant]> = Mutex([:])

    /// Longer than a batch takes.
    private static let patience = DispatchTimeInterval.milliseconds(500)

    public init() {}

    // At the mass-failure guard.

    /// Waits for the turn to have suspects judged.
    ///
    /// A topic's guard is locked from then until the batch is committed. Who waits for this in PostgreSQL gives up after the lock
    /// timeout, and its suspects are written once more, aside.
    ///
    /// - Returns: False when that took too long; then it is for PostgreSQL to say who waits.
    func enterGuard() -> Bool {
        // Who has not come back in time is not waited for by every batch.
        let patience = isOverdue.load(ordering: .relaxed) ? DispatchTimeInterval.nanoseconds(0) : Self.patience
        let isIn = guardTurn.wait(timeout: .now() + patience) == .success
        isOverdue.store(!isIn, ordering: .relaxed)
        return isIn
    }

    func leaveGuard() { guardTurn.signal() }

    // At a past leaf that is to be read whole.

    /// Whether the first drain reads a past leaf whole at this moment. The second one sees to what is fresh meanwhile.
    public var isReading: Bool { reading.load(ordering: .relaxed) }

    func reads(_ isReading: Bool) { reading.store(isReading, ordering: .relaxed) }

    /// After attempts have failed for so long, the second drain helps for so long. Then it keeps away, for the first to try again
    /// without its being in the way.
    private static let (trying, helping) = (Duration.milliseconds(300), Duration.seconds(1))

    /// The first drain could not have a past leaf to read it whole, and goes through it range by range.
    ///
    /// - Parameter triesAgain: False when it will not try again before the leaf is drained.
    func couldNotRead(_ leaf: Leaf, triesAgain: Bool, now: ContinuousClock.Instant = .now) {
        helpedUntil.withLock { until in
            if !triesAgain {
                until[leaf] = now + .seconds(3600)
                return
            }
            guard let last = until[leaf] else {
                until[leaf] = now
                return
            }
            if now > last + Self.trying { until[leaf] = now + Self.helping }
        }
    }

    /// The leaf was read, or is drained.
    func isDone(_ leaf: Leaf) { helpedUntil.withLock { $0[leaf] = nil } }

    /// Whether the second one may help with a past leaf that should be read whole.
    func mayHelp(_ leaf: Leaf, now: ContinuousClock.Instant = .now) -> Bool {
        helpedUntil.withLock { $0[leaf].map { now < $0 } ?? false }
    }
}
