import Foundation
import TestRun
import Testing

/// Runs each test of a suite on its own thread, a few tests at once.
///
/// Swift's thread pool has one thread per core. A test that blocks such a thread while it waits for a database or a process
/// leaves the core idle. On its own thread it lets other tests run.
public struct OwnThread: SuiteTrait, TestTrait, TestScoping {
    public var isRecursive: Bool { true }

    /// How long a test may take. A test that takes longer fails, and what it uses is shown and ended: `TestResources`. The slowest take a
    /// third of it on two quiet cores.
    private static let limit: Duration = Soak.isWhole ? .seconds(7200) : .seconds(300)

    public func provideScope(
        for test: Test, testCase: Test.Case?, performing function: @Sendable () async throws -> Void
    ) async throws {
        await Turns.shared.take()
        let start = ContinuousClock.now
        let limit = Self.limit
        let name = test.displayName ?? test.name
        let resources = TestResources()
        let watch = Watch(limit) {
            resources.end(name, after: limit)
        } onEnd: {
            fatalError("the test \"\(name)\" hangs, though all that it used has ended")
        }
        let thread = TestThread()
        let result: Result<Void, any Error>
        do {
            result = .success(
                try await TestResources.$current.withValue(resources) {
                    try await withTaskExecutorPreference(thread) { try await function() }
                })
        } catch {
            result = .failure(error)
        }
        thread.end()
        watch.cancel()
        Durations.shared?.note(ContinuousClock.now - start, of: test)
        await Turns.shared.giveBack()
        try result.get()
        if resources.isOver { throw TestIsTooLong(limit: limit) }
    }
}

extension Trait where Self == OwnThread {
    /// For suites whose tests block: see `OwnThread`.
    public static var ownThread: Self { Self() }
}

private struct TestIsTooLong: Error, CustomStringConvertible {
    let limit: Duration
    var description: String { "the test took longer than \(limit)" }
}

/// Calls back when a time has passed, and again if the test does not end soon afterwards.
private final class Watch: @unchecked Sendable {  // Timers may be used from any thread.
    private static let queue = DispatchQueue(label: "limits of tests", attributes: .concurrent)
    /// What a test has left once everything that it uses has ended.
    private static let grace: DispatchTimeInterval = .seconds(60)

    private let limit = DispatchSource.makeTimerSource(queue: queue)
    private let end = DispatchSource.makeTimerSource(queue: queue)

    init(_ time: Duration, _ onLimit: @escaping @Sendable () -> Void, onEnd: @escaping @Sendable () -> Void) {
        limit.schedule(deadline: .now() + .seconds(Int(time.components.seconds)))
        limit.setEventHandler { [end] in
            onLimit()
            end.schedule(deadline: .now() + Self.grace)
        }
        end.setEventHandler(handler: onEnd)
        limit.activate()
        end.activate()
    }

    func cancel() {
        limit.cancel()
        end.cancel()
    }
}

/// Writes the durations of these tests, one line each with the test's file, to the file that the variable TEST_DURATIONS names. Swift's own
/// report includes the wait for a test's turn; this one does not.
private struct Durations {
    static let shared = ProcessInfo.processInfo.environment["TEST_DURATIONS"].flatMap {
        FileHandle(forWritingAtPath: $0)
    }
    .map { Durations(file: $0) }

    let file: FileHandle

    func note(_ duration: Duration, of test: Test) {
        let seconds = String(format: "%.3f", duration / .seconds(1))
        try? file.write(
            contentsOf: Data("\(seconds)\t\(test.displayName ?? test.name)\t\(test.sourceLocation.fileID)\n".utf8))
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
