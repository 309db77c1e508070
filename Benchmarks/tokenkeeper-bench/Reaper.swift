import Foundation

/// A shell that kills a process when this program ends, however it ends: otherwise a stopped daemon would stay forever.
final class Reaper {
    private let shell = Process()
    private let lifeline = Pipe()

    init(of process: Int32) throws {
        shell.executableURL = URL(fileURLWithPath: "/bin/sh")
        shell.arguments = ["-c", "read word || kill -KILL \(process)"]
        shell.standardInput = lifeline
        shell.standardOutput = FileHandle.nullDevice
        try shell.run()
    }

    func dismiss() {
        try? lifeline.fileHandleForWriting.write(contentsOf: Data("done\n".utf8))
        shell.waitUntilExit()
    }

    deinit { try? lifeline.fileHandleForWriting.close() }
}
