internal import Synchronization
internal import TokenLedger

/// The wish that the process end, seen by all workers.
final class ShutdownRequest: Sendable {
    private let asked = Atomic(false)
    private let bells: Mutex<[Wakeup]> = Mutex([])

    var isAsked: Bool { asked.load(ordering: .acquiring) }

    /// Has a bell rung too when the wish is uttered.
    func alsoRing(_ other: Wakeup) {
        bells.withLock { $0.append(other) }
    }

    func ask() {
        asked.store(true, ordering: .releasing)
        for bell in bells.withLock({ $0 }) { bell.ring() }
    }
}
