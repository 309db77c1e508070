internal import Dispatch
internal import Synchronization

/// What two drains of one process have in common.
public final class DrainPair: Sendable {
    private let guardTurn = DispatchSemaphore(value: 1)
    private let isOverdue = Atomic(false)
    private let reading = Atomic(false)
    private let helpedUntil: Mutex<[Partition: ContinuousClock.Instant]> = Mutex([:])

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

    // At a sealed partition that is to be read whole.

    /// Whether the first drain reads a sealed partition whole at this moment. The second one sees to what is fresh meanwhile.
    public var isReading: Bool { reading.load(ordering: .relaxed) }

    func reads(_ isReading: Bool) { reading.store(isReading, ordering: .relaxed) }

    /// After attempts have failed for so long, the second drain helps for so long. Then it keeps away, for the first to try again
    /// without its being in the way.
    private static let (trying, helping) = (Duration.milliseconds(300), Duration.seconds(1))

    /// The first drain could not have a sealed partition to read it whole, and goes through it range by range.
    ///
    /// - Parameter triesAgain: False when it will not try again before the partition is drained.
    func couldNotRead(_ partition: Partition, triesAgain: Bool, now: ContinuousClock.Instant = .now) {
        helpedUntil.withLock { until in
            if !triesAgain {
                until[partition] = now + .seconds(3600)
                return
            }
            guard let last = until[partition] else {
                until[partition] = now
                return
            }
            if now > last + Self.trying { until[partition] = now + Self.helping }
        }
    }

    /// The leaf was read, or is drained.
    func isDone(_ partition: Partition) { helpedUntil.withLock { $0[partition] = nil } }

    /// Whether the second one may help with a sealed partition that should be read whole.
    func mayHelp(_ partition: Partition, now: ContinuousClock.Instant = .now) -> Bool {
        helpedUntil.withLock { $0[partition].map { now < $0 } ?? false }
    }
}
