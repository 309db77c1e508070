import Foundation

/// Copies of the template database that are made ahead, so that a test does not wait for its own.
final class SpareDatabases: @unchecked Sendable {  // Everything is behind the condition's lock.
    private let condition = NSCondition()
    private var ready: [String] = []
    private var failure: (any Error)?
    private let count: Int

    /// - Parameters:
    ///   - count: How many wait for tests.
    ///   - create: Makes one, and returns its name. Called on a thread of its own.
    init(_ count: Int, create: @escaping @Sendable () throws -> String) {
        self.count = count
        Thread { [weak self] in
            while let self, waitForRoom() { note(Result(catching: create)) }
        }.start()
    }

    func take() throws -> String {
        condition.lock()
        defer { condition.unlock() }
        while ready.isEmpty {
            if let failure { throw failure }
            condition.wait()
        }
        defer { condition.broadcast() }
        return ready.removeFirst()
    }

    /// - Returns: False once making one has failed.
    private func waitForRoom() -> Bool {
        condition.lock()
        defer { condition.unlock() }
        while ready.count >= count { condition.wait() }
        return failure == nil
    }

    private func note(_ made: Result<String, any Error>) {
        condition.lock()
        defer { condition.unlock() }
        switch made {
        case .success(let name): ready.append(name)
        case .failure(let error): failure = error
        }
        condition.broadcast()
    }
}
