import Foundation
import Testing

/// Runs each test of a suite on its own thread, a few tests at once.
///
/// Swift's thread pool has one thread per core. A test that blocks such a thread while it waits for a database or a process
/// leaves the core idle. On its own thread it lets other tests run.
public struct OwnThread: SuiteTrait, TestTrait, TestScoping {
    public var isRecursive: Bool { true }

    public func provideScope(
        for test: Test, testCase: Test.Case?, performing function: @Sendable () async throws -> Void
    ) async throws {
        await Turns.shared.take()
        let start = ContinuousClock.now
        let thread = TestThread()
        let result: Result<Void, any Error>
        do {
            result = .success(try await withTaskExecutorPreference(thread) { try await function() })
        } catch {
            result = .failure(error)
        }
        thread.end()
        Durations.shared?.note(ContinuousClock.now - start, of: test)
        await Turns.shared.giveBack()
        try result.get()
    }
}

extension Trait where Self == OwnThread {
    /// For suites whose tests block: see `OwnThread`.
    public static var ownThread: Self { Self() }
}

/// Writes the durations of these tests, one line each, to the file that the variable TEST_DURATIONS names. Swift's own report
/// includes the wait for a test's turn; this one does not.
private struct Durations {
    static let shared = ProcessInfo.processInfo.environment["TEST_DURATIONS"].flatMap {
        FileHandle(forWritingAtPath: $0)
    }
    .map { Durations(file: $0) }

    let file: FileHandle

    func note(_ duration: Duration, of test: Test) {
        let seconds = String(format: "%.3f", duration / .seconds(1))
        try? file.write(contentsOf: Data("\(seconds)\t\(test.displayName ?? test.name)\n".utf8))
    }
}

/// Limits how many of these tests run at once: more would only slow one another down.
private actor Turns {
    static let shared = Turns(ProcessInfo.processInfo.activeProcessorCount * 3)

    private var free: Int
    private var waiting: [CheckedContinuation<Void, Never>] = []

    init(_ count: Int) { free = count }

    func take() async {
        if free > 0 {
            free -= 1
        } else {
            await withCheckedContinuation { waiting.append($0) }
        }
    }

    func giveBack() {
        if waiting.isEmpty { free += 1 } else { waiting.removeFirst().resume() }
    }
}

/// One thread that runs what is enqueued until `end` is called.
private final class TestThread: TaskExecutor, @unchecked Sendable {  // The state is behind the condition's lock.
    private let condition = NSCondition()
    private var jobs: [UnownedJob] = []
    private var isOver = false

    init() {
        let thread = Thread { [self] in run() }
        thread.stackSize = 8 << 20
        thread.start()
    }

    func enqueue(_ job: consuming ExecutorJob) {
        let job = UnownedJob(job)
        condition.withLock {
            jobs.append(job)
            condition.signal()
        }
    }

    /// Still runs what is already enqueued.
    func end() {
        condition.withLock {
            isOver = true
            condition.signal()
        }
    }

    private func run() {
        while true {
            let next: [UnownedJob] = condition.withLock {
                while jobs.isEmpty && !isOver { condition.wait() }
                defer { jobs = [] }
                return jobs
            }
            if next.isEmpty { return }
            for job in next { job.runSynchronously(on: asUnownedTaskExecutor()) }
        }
    }
}
