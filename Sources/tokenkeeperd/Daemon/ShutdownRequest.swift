internal import Glibc
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

    /// A request that SIGINT and SIGTERM make, for a command that stops between two batches. It works as long as `signals` lives.
    static func bySignal() -> (request: ShutdownRequest, signals: Signals) {
        let (request, signals) = (ShutdownRequest(), Signals())
        signals.on(SIGTERM) { request.ask() }
        signals.on(SIGINT) { request.ask() }
        return (request, signals)
    }

    func ask() {
        asked.store(true, ordering: .releasing)
        for bell in bells.withLock({ $0 }) { bell.ring() }
    }
}
