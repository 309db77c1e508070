import Foundation

/// Runs it so many times at once, each on a thread of its own, and waits for all: `concurrentPerform` takes no more than there are cores.
func atOnce(_ count: Int, _ work: @escaping @Sendable (Int) -> Void) {
    let group = DispatchGroup()
    for worker in 0..<count {
        group.enter()
        Thread.detachNewThread {
            work(worker)
            group.leave()
        }
    }
    group.wait()
}

/// What went wrong in other threads.
final class Failures: @unchecked Sendable {  // Behind the lock.
    private let lock = NSLock()
    private var messages: [String] = []

    func add(_ message: String) { lock.withLock { messages.append(message) } }
    var all: [String] { lock.withLock { messages } }
}
