import Foundation

/// Runs the closure this many times at once, each on its own thread, and waits for all. `concurrentPerform` would use no more
/// threads than there are cores.
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

/// The failures of other threads.
final class Failures: @unchecked Sendable {  // Behind the lock.
    private let lock = NSLock()
    private var messages: [String] = []

    func add(_ message: String) { lock.withLock { messages.append(message) } }
    var all: [String] { lock.withLock { messages } }
}
