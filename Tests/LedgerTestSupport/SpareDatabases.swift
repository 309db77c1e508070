import Foundation

/// Copies of the template database that are made ahead, so that a test does not wait for its own. It lives as long as the process.
final class SpareDatabases: @unchecked Sendable {  // Everything is behind the condition's lock.
    private let condition = NSCondition()
    private var made: [Result<String, any Error>] = []

    /// - Parameters:
    ///   - count: How many wait for tests.
    ///   - create: Makes one, and returns its name. Called on a thread of its own. An error goes to one test.
    init(_ count: Int, create: @escaping @Sendable () throws -> String) {
        Thread { [self] in
            while true {
                let next = Result(catching: create)
                condition.lock()
                made.append(next)
                condition.broadcast()
                while made.count >= count { condition.wait() }
                condition.unlock()
            }
        }.start()
    }

    func take() throws -> String {
        condition.lock()
        defer { condition.unlock() }
        let deadline = Date.now + 60
        while made.isEmpty {
            guard condition.wait(until: deadline) else { throw TestFailure("no database within a minute") }
        }
        condition.broadcast()
        return try made.removeFirst().get()
    }
}
