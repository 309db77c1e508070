internal import Synchronization

/// What the two drains of a process share: whether the helper may drain a partition that the primary wants to read in bulk.
public final class DrainPair: Sendable {
    private let reading = Atomic(false)
    private let helpedUntil: Mutex<[Partition: ContinuousClock.Instant]> = Mutex([:])

    public init() {}

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
