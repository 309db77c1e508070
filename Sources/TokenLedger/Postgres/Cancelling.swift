internal import Dispatch
internal import Synchronization

/// Whether the server is being asked to cancel a statement. It may outlive its connection.
final class Cancelling: Sendable {
    private let isUnderWay = Atomic(false)
    private let group = DispatchGroup()

    /// - Returns: False if a request is already on its way.
    func begin() -> Bool {
        if isUnderWay.exchange(true, ordering: .acquiring) { return false }
        group.enter()
        return true
    }

    func end() {
        isUnderWay.store(false, ordering: .releasing)
        group.leave()
    }

    /// Waits until the request has ended, for at most two seconds: the server may not respond at all.
    func wait() { _ = group.wait(timeout: .now() + 2) }
}
