import Foundation
import Synchronization

/// What a test uses outside of its own thread: daemons, databases. If the test hangs, all of it is shown and then ended, so that the test
/// fails and the run goes on.
public final class TestResources: Sendable {
    /// Those of the test that runs on this thread; nil on threads that a test has started, and outside of suites with `ownThread`.
    @TaskLocal public static var current: TestResources?

    private struct Resource {
        let show: @Sendable () -> String
        let end: @Sendable () -> Void
    }

    private let resources = Mutex((used: [Resource](), isOver: false))

    /// Whether the test's time is over. What waits in a loop should look.
    public static var isOver: Bool { current?.isOver ?? false }

    public init() {}

    /// Whether its time is over.
    public var isOver: Bool { resources.withLock { $0.isOver } }

    /// Notes something that the current test uses. If the test's time is over, it is ended at once.
    ///
    /// - Parameters:
    ///   - show: What it is doing, for a person: stacks, statements. Takes seconds at most. Called on another thread.
    ///   - end: Makes whatever waits for it fail. Takes seconds at most.
    public static func note(show: @escaping @Sendable () -> String, end: @escaping @Sendable () -> Void) {
        let isLate = current?.resources.withLock { resources in
            if !resources.isOver { resources.used.append(Resource(show: show, end: end)) }
            return resources.isOver
        }
        if isLate == true { end() }
    }

    /// Shows and ends everything.
    public func end(_ test: String, after limit: Duration) {
        let used = resources.withLock { resources in
            resources.isOver = true
            return resources.used
        }
        let shown = Mutex([String](repeating: "", count: used.count))
        DispatchQueue.concurrentPerform(iterations: used.count) { number in
            let words = used[number].show()
            shown.withLock { $0[number] = words }
        }
        let words = ([Stacks.ofThisProcess] + shown.withLock { $0 }).joined(separator: "\n")
        FileHandle.standardError.write(
            Data("the test \"\(test)\" has not ended after \(limit)\n\(words)\n".utf8))
        for resource in used { resource.end() }
    }
}

/// What the threads of a process are doing.
public enum Stacks {
    /// The stacks, if a debugger is installed and may look; otherwise where each thread waits in the kernel.
    public static func of(_ process: Int32) -> String {
        shell(
            """
            echo "process \(process): $(tr '\\0' ' ' </proc/\(process)/cmdline)"
            timeout 15 gdb -nx -batch -p \(process) -ex 'thread apply all backtrace 25' 2>/dev/null | grep -E '^(Thread|#)' ||
            """ + " " + waits(process))
    }

    /// Where each thread of this process waits in the kernel. A debugger would stop all tests.
    static var ofThisProcess: String { shell("echo 'the threads of the tests'; " + waits(getpid())) }

    private static func waits(_ process: Int32) -> String {
        "for thread in /proc/\(process)/task/*; do echo \"$(cat \"$thread/comm\"): $(cat \"$thread/wchan\")\"; done"
    }

    /// What a shell command prints.
    public static func shell(_ command: String) -> String {
        let shell = Process()
        shell.executableURL = URL(fileURLWithPath: "/bin/sh")
        shell.arguments = ["-c", command]
        let output = Pipe()
        shell.standardOutput = output
        shell.standardError = FileHandle.nullDevice
        guard (try? shell.run()) != nil else { return "" }
        return String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
    }
}
