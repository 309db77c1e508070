internal import Dispatch
internal import Synchronization

/// Work that is requested more often than it can be done. While it runs, at most one more run waits, however many requests arrive.
/// Each request is followed by a complete run.
final class CoalescedWork: Sendable {
    private let queue: DispatchQueue
    private let isWaiting = Atomic(false)
    private let work: @Sendable () -> Void

    /// - Parameter queue: A serial queue.
    init(on queue: DispatchQueue, _ work: @escaping @Sendable () -> Void) {
        self.queue = queue
        self.work = work
    }

    func request() {
        if isWaiting.exchange(true, ordering: .acquiringAndReleasing) { return }
        queue.async { [self] in
            // Before the work: this run may not see what later requests are about.
            isWaiting.store(false, ordering: .sequentiallyConsistent)
            work()
        }
    }
}
