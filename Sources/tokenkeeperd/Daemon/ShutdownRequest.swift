internal import Synchronization
internal import TokenLedger

/// The request to shut down, which all workers see.
final class ShutdownRequest: Sendable {
    private let asked = Atomic(false)
    private let bells: Mutex<[Wakeup]> = Mutex([])

    var isAsked: Bool { asked.load(ordering: .acquiring) }

    /// Also rings this bell when a shutdown is requested.
    func alsoRing(_ other: Wakeup) {
        bells.withLock { $0.append(other) }
    }

    func ask() {
        asked.store(true, ordering: .releasing)
        for bell in bells.withLock({ $0 }) { bell.ring() }
    }
}
