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

    private let resources = Mutex<[Resource]>([])
    private let over = Atomic(false)

    /// Whether the test's time is over. What waits in a loop should look.
    public static var isOver: Bool { current?.over.load(ordering: .acquiring) ?? false }

    /// Notes something that the current test uses.
    ///
    /// - Parameters:
    ///   - show: What it is doing, for a person: stacks, statements. Called from another thread.
    ///   - end: Makes whatever waits for it fail. Called from another thread.
    public static func note(show: @escaping @Sendable () -> String, end: @escaping @Sendable () -> Void) {
        current?.resources.withLock { $0.append(Resource(show: show, end: end)) }
    }

    /// Shows and ends everything.
    func end(_ test: String, after limit: Duration) {
        over.store(true, ordering: .releasing)
        let used = resources.withLock { $0 }
        let shown = [Stacks.of(getpid())] + used.map { $0.show() }
        FileHandle.standardError.write(
            Data("the test \"\(test)\" has not ended after \(limit)\n\(shown.joined(separator: "\n"))\n".utf8))
        for resource in used { resource.end() }
    }

    var isOver: Bool { over.load(ordering: .acquiring) }
}

/// What the threads of a process are doing.
public enum Stacks {
    /// The stacks, if a debugger is installed and may look; otherwise where each thread waits in the kernel.
    public static func of(_ process: Int32) -> String {
        let shell = Process()
        shell.executableURL = URL(fileURLWithPath: "/bin/sh")
        shell.arguments = [
            "-c",
            """
            echo "process \(process): $(tr '\\0' ' ' </proc/\(process)/cmdline)"
            timeout 60 gdb -nx -batch -p \(process) -ex 'thread apply all backtrace 25' 2>/dev/null | grep -E '^(Thread|#)' ||
                for thread in /proc/\(process)/task/*; do echo "$(cat "$thread/comm"): $(cat "$thread/wchan")"; done
            """,
        ]
        let output = Pipe()
        shell.standardOutput = output
        shell.standardError = FileHandle.nullDevice
        guard (try? shell.run()) != nil else { return "process \(process)" }
        return String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
    }
}
