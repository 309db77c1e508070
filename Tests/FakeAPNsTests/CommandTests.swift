import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("fake-apns, the command", .ownThread)
struct CommandTests {
    /// The binary that was built with the tests.
    private static let program: String = {
        let tests = (try? FileManager.default.destinationOfSymbolicLink(atPath: "/proc/self/exe")) ?? ""
        return URL(fileURLWithPath: tests).deletingLastPathComponent().appendingPathComponent("fake-apns").path
    }()

    private let folder = NSTemporaryDirectory() + "fake-apns-command-\(UUID().uuidString)"

    @Test func `it answers by its script, logs each request, and reports when it ends`() throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        let script = "{\"deaths\": [{\"token\": \"aaaa\", \"at\": 1508249865488}]}"
        try script.write(toFile: folder + "/script.json", atomically: true, encoding: .utf8)

        let process = Process()
        process.executableURL = URL(fileURLWithPath: Self.program)
        process.arguments = [
            "--authority", Fixture.authority.folder, "--port", "0", "--quiet", "--script", folder + "/script.json",
            "--report", folder + "/report.json", "--log", folder + "/log",
        ]
        let output = Pipe()
        process.standardOutput = output
        try process.run()
        defer { if process.isRunning { kill(process.processIdentifier, SIGKILL) } }
        let said = String(decoding: output.fileHandleForReading.availableData, as: UTF8.self)
        let port = try #require(Int(said.trimmingCharacters(in: .whitespacesAndNewlines)), "\(said)")

        let id = "69e4908d-5248-4d9c-b91c-3c9c86d44e1b"
        let stale = try Fixture.request {
            $0.path = "/3/device/aaaa"
            $0.headers = [("apns-id", id)]
        }
        #expect(try stale.send(to: port, trusting: Fixture.authority).status == 410)
        #expect(try Fixture.request().send(to: port, trusting: Fixture.authority).status == 200)
        process.terminate()
        process.waitUntilExit()
        #expect(process.terminationReason == .exit)
        #expect(process.terminationStatus == 0)

        let log = try String(contentsOfFile: folder + "/log", encoding: .utf8).split(separator: "\n")
        #expect(log.count == 2)
        let fields = try #require(log.first).split(separator: "\t").map(String.init)
        #expect(fields.dropLast() == [id, "aaaa", "com.example.app", "410", "Unregistered", "1"])
        #expect(try #require(Int64(fields[6])) > 1_508_249_865_488)
        let report = try JSONDecoder().decode(
            Report.self, from: Data(contentsOf: URL(fileURLWithPath: folder + "/report.json")))
        #expect(report.requests == 2)
        #expect(report.connections == 2)
        #expect(report.outcomes == ["200": 1, "410 Unregistered": 1])
    }

    private struct Report: Decodable {
        var requests: Int
        var connections: Int
        var outcomes: [String: Int]
    }

    @Test func `an invalid script ends the command with an error message`() throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(atPath: folder) }
        try "{\"rulez\": []}".write(toFile: folder + "/script.json", atomically: true, encoding: .utf8)
        let answer = try CurlRequest.run([
            Self.program, "--authority", Fixture.authority.folder, "--port", "0", "--script", folder + "/script.json",
        ])
        #expect(answer.exit != 0)
        #expect(answer.complaint.contains("unknown key \"rulez\""))
    }
}
