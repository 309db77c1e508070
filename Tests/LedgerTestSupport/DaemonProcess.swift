import Foundation
import TestRun

/// The real daemon, as a process.
public final class DaemonProcess: @unchecked Sendable {  // Process is only touched under Foundation's own locks.
    private let process = Process()
    private let log: String

    /// The binary that was built with the tests.
    public static let program: String = {
        let tests = (try? FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/exe")) ?? ""
        return URL(fileURLWithPath: tests).deletingLastPathComponent().appendingPathComponent("tokenkeeperd").path
    }()

    /// - Parameters:
    ///   - url: The database; nil if `environment` or `arguments` name it.
    ///   - timing: The fraction of the product's pauses that it takes: `Timing`.
    public init(
        _ url: String?, settings: [String] = [], arguments: [String] = [], environment: [String: String] = [:],
        timing: Double = 1
    ) throws {
        log = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString).log"
        _ = FileManager.default.createFile(atPath: log, contents: nil)
        process.executableURL = URL(fileURLWithPath: Self.program)
        process.arguments = ["run"] + arguments + settings.flatMap { ["--set", $0] }
        process.environment = ProcessInfo.processInfo.environment.merging(["TEST_TIMING": "\(timing)"]) { $1 }
            .merging(environment) { $1 }
        if let url { process.environment?["TOKENKEEPER_DATABASE_URL"] = url }
        process.standardError = try FileHandle(forWritingTo: URL(fileURLWithPath: log))
        process.standardInput = FileHandle.nullDevice
        try process.run()
        TestResources.note { [weak self] in
            guard let self, isRunning else { return "" }
            return "\(Stacks.of(pid))its log:\n\(logged.split(separator: "\n").suffix(30).joined(separator: "\n"))"
        } end: { [weak self] in
            if let self, isRunning { signal(SIGKILL) }
        }
    }

    deinit {
        if process.isRunning { kill(process.processIdentifier, SIGKILL) }
        process.waitUntilExit()
        try? FileManager.default.removeItem(atPath: log)
    }

    public var pid: Int32 { process.processIdentifier }

    public var isRunning: Bool { process.isRunning }

    public func signal(_ number: Int32) {
        kill(process.processIdentifier, number)
    }

    /// Waits for the process to end and returns the exit status, negative for a signal.
    @discardableResult
    public func wait() -> Int32 {
        process.waitUntilExit()
        return process.terminationReason == .uncaughtSignal ? -process.terminationStatus : process.terminationStatus
    }

    /// Stops it as intended.
    @discardableResult
    public func stop() -> Int32 {
        signal(SIGTERM)
        return wait()
    }

    /// Everything that it has logged so far.
    public var logged: String {
        (try? String(contentsOfFile: log, encoding: .utf8)) ?? ""
    }
}
