internal import Dispatch
internal import Synchronization

/// What the two drains of a process share: their turns at the mass-failure guard, and whether the helper may drain a partition
/// that the primary wants to read in bulk.
public final class DrainPair: Sendable {
    private let guardTurn = DispatchSemaphore(value: 1)
    private let isOverdue = Atomic(false)
    private let reading = Atomic(false)
    private let helpedUntil: Mutex<[Partition: ContinuousClock.Instant]> = Mutex([:])

    private let patience: DispatchTimeInterval

    public convenience init() { self.init(patience: .milliseconds(500)) }

    /// - Parameter patience: How long one drain waits for the other at the guard; longer than a batch takes.
    init(patience: DispatchTimeInterval) { self.patience = patience }

    /// Serializes guard decisions within this process.
    ///
    /// The row of a topic's guard is locked from its decision until the batch commits. A drain that waits in PostgreSQL instead would
    /// run into the lock timeout, and write its suspects a second time, to the retry partition.
    ///
    /// - Returns: False if the other drain took too long. Then PostgreSQL decides which drain waits.
    func enterGuard() -> Bool {
        // Once the other drain is overdue, batches no longer wait for it.
        let patience = isOverdue.load(ordering: .relaxed) ? DispatchTimeInterval.nanoseconds(0) : patience
        let isIn = guardTurn.wait(timeout: .now() + patience) == .success
        isOverdue.store(!isIn, ordering: .relaxed)
        return isIn
    }

    func leaveGuard() { guardTurn.signal() }

    /// Whether the primary is reading a partition in bulk at this moment. Meanwhile the helper drains new results.
    public var isReading: Bool { reading.load(ordering: .relaxed) }

    func reads(_ isReading: Bool) { reading.store(isReading, ordering: .relaxed) }

    /// After failed attempts over the first duration, the helper helps for the second. Then it stays away, so that the primary can try
    /// again undisturbed.
    private static let (trying, helping) = (Duration.milliseconds(300), Duration.seconds(1))

    /// The primary could not read a partition in bulk, and drains it in batches.
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

    /// The partition has been read in bulk, or is drained.
    func isDone(_ partition: Partition) { helpedUntil.withLock { $0[partition] = nil } }

    /// Whether the helper may drain a partition that suits a bulk read.
    func mayHelp(_ partition: Partition, now: ContinuousClock.Instant = .now) -> Bool {
        helpedUntil.withLock { $0[partition].map { now < $0 } ?? false }
    }
}
