import Foundation
import LedgerTestSupport

/// The receiving server: a process on a port of 127.0.0.1.
final class SendingServer {
    enum Kind: String {
        /// Checks each request as APNs does, and allows one stream until it has seen a valid provider token.
        case validating = "the fake APNs"
        /// Looks up a file and checks nothing.
        case plain = "nghttpd"
    }

    /// The fake's final report.
    struct Report: Decodable {
        var requests: Int
        /// By status and reason.
        var outcomes: [String: Int]
        var connections: Int
        var faults: [String]
    }

    let port: Int
    private let process = Process()
    private let reaper: Reaper
    private let reportFile: String
    private let logFile: String

    var pid: Int32 { process.processIdentifier }

    /// The fake that was built with this program.
    private static let fake = URL(fileURLWithPath: DaemonProcess.program).deletingLastPathComponent()
        .appendingPathComponent("fake-apns")

    /// - Parameters:
    ///   - script: The fake's responses, as JSON (see docs/reference/fake-apns.md); nil to accept everything.
    ///   - logs: Whether the fake writes a line per request, for `arrivals`.
    ///   - more: More arguments of the fake.
    init(_ kind: Kind, _ work: SendingWork, script: String? = nil, logs: Bool = false, more: [String] = []) throws {
        let name = UUID().uuidString.prefix(8)
        reportFile = "\(work.folder)/report-\(name).json"
        logFile = "\(work.folder)/log-\(name)"
        let output = Pipe()
        process.standardInput = FileHandle.nullDevice
        switch kind {
        case .validating:
            process.executableURL = Self.fake
            var arguments = ["--authority", work.authority, "--port", "0", "--quiet", "--proves-first"]
            arguments += ["--report", reportFile] + more + (logs ? ["--log", logFile] : [])
            if let script {
                let file = "\(work.folder)/script-\(name).json"
                try script.write(toFile: file, atomically: true, encoding: .utf8)
                arguments += ["--script", file]
            }
            process.arguments = arguments
            process.standardOutput = output
            try process.run()
            reaper = try Reaper(of: process.processIdentifier)
            var text = Data()
            while text.last != UInt8(ascii: "\n") {
                let piece = output.fileHandleForReading.availableData
                guard !piece.isEmpty else { throw TestFailure("fake-apns has not started") }
                text += piece
            }
            let digits = String(decoding: text, as: UTF8.self).trimmingCharacters(in: .whitespacesAndNewlines)
            guard let port = Int(digits) else { throw TestFailure("fake-apns says \(digits), expected its port") }
            self.port = port
        case .plain:
            let port = try TestCluster.freePort()
            process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
            process.arguments = [
                "nghttpd", "--address=127.0.0.1", "--max-concurrent-streams=1000", "--htdocs=\(work.root)", "\(port)",
                "\(work.authority)/server.key", "\(work.authority)/server.pem",
            ]
            process.standardOutput = FileHandle.nullDevice
            try process.run()
            reaper = try Reaper(of: process.processIdentifier)
            self.port = port
            try eventually("nghttpd takes connections", within: 20) {
                try ProgramRun(["curl", "-sk", "-o", "/dev/null", "https://127.0.0.1:\(port)/"]).status == 0
            }
        }
    }

    /// When each request came, according to the fake's log. Call it after `stop`.
    func arrivals() throws -> Arrivals {
        let lines = try String(contentsOfFile: logFile, encoding: .utf8).split(separator: "\n")
        return Arrivals(lines.compactMap { line in line.split(separator: "\t").last.flatMap { Int64($0) } })
    }

    /// Stops the server.
    ///
    /// - Returns: The fake's counts; nil for nghttpd, which counts nothing.
    @discardableResult
    func stop() throws -> Report? {
        process.terminate()
        process.waitUntilExit()
        reaper.dismiss()
        guard let data = FileManager.default.contents(atPath: reportFile) else { return nil }
        return try JSONDecoder().decode(Report.self, from: data)
    }
}
