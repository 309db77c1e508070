internal import Dispatch
internal import Synchronization

/// What two drains of one process have in common.
public final class DrainPair: Sendable {
    private let guardTurn = DispatchSemaphore(value: 1)
    private let inPlace: Mutex<Set<Leaf>> = Mutex([])

    /// Far longer than a batch takes, far shorter than it takes to be thought dead.
    private static let patience = DispatchTimeInterval.seconds(5)

    public init() {}

    /// Waits for the turn to have suspects judged.
    ///
    /// A topic's guard is locked from then until the batch is committed. Who waits for this in PostgreSQL gives up after the lock
    /// timeout, and its suspects are written once more, aside.
    ///
    /// - Returns: False when that took too long; then it is for PostgreSQL to say who waits.
    func enterGuard() -> Bool { guardTurn.wait(timeout: .now() + Self.patience) == .success }

    func leaveGuard() { guardTurn.signal() }

    /// Says whether the first drain goes through a past leaf range by range, because something keeps it from reading it whole.
    func note(_ leaf: Leaf, isInPlace: Bool) {
        inPlace.withLock { leaves in
            if isInPlace { leaves.insert(leaf) } else { leaves.remove(leaf) }
        }
    }

    /// Whether the second one may help with a past leaf that should be read whole.
    func isInPlace(_ leaf: Leaf) -> Bool { inPlace.withLock { $0.contains(leaf) } }
}
