internal import Synchronization
internal import TokenLedger

/// `run --migrate`: one worker applies what is missing, once, and the others wait for it.
final class MigrationStep: Sendable {
    private let done = Atomic(false)
    private let bell: Wakeup

    /// - Parameter bell: The bell of the worker that waits.
    init(ringing bell: Wakeup) {
        self.bell = bell
    }

    var isDone: Bool { done.load(ordering: .acquiring) }

    func finish() {
        done.store(true, ordering: .releasing)
        bell.ring()
    }
}
