internal import Dispatch
internal import Synchronization

/// Work that is asked for more often than it can be done. While it runs, at most one more run waits, however often it is asked for;
/// each request is followed by a whole run.
final class CoalescedWork: Sendable {
    private let queue: DispatchQueue
    private let isWaiting = Atomic(false)
    private let work: @Sendable () -> Void

    /// - Parameter queue: Does one thing at a time.
    init(on queue: DispatchQueue, _ work: @escaping @Sendable () -> Void) {
        self.queue = queue
        self.work = work
    }

    func request() {
        if isWaiting.exchange(true, ordering: .acquiringAndReleasing) { return }
        queue.async { [self] in
            // Before the work: what is asked for from now on, this run may no longer see.
            isWaiting.store(false, ordering: .sequentiallyConsistent)
            work()
        }
    }
}
