import FakeAPNs
import Foundation

/// A request that the `curl` command sends: a client that is independent of our server. It is valid unless a test changes it.
struct CurlRequest {
    var path = "/3/device/" + CurlRequest.token
    var method = "POST"
    /// Nil for no such header.
    var authorization: String?
    /// A nil value removes a header. An empty value is sent.
    var headers: [(name: String, value: String?)] = []
    var body = "{\"aps\":{\"alert\":\"Hello\"}}"
    var arguments: [String] = []

    static let token = String(repeating: "a1b2c3d4", count: 8)

    struct Answer {
        /// curl's exit status; 0 for success.
        var exit: Int32
        /// Nil if there was no answer.
        var status: Int?
        var headers: [String: String]
        var body: String
        /// curl's error message.
        var complaint: String
    }

    /// Sends it to localhost and waits for the answer.
    func send(to port: Int, trusting authority: TestAuthority) throws -> Answer {
        var all: [(name: String, value: String?)] = [("apns-topic", "com.example.app"), ("apns-push-type", "alert")]
        all.append(("authorization", authorization))
        // A header that is given replaces the default one. Given twice, it is sent twice.
        all.removeAll { sent in headers.contains { $0.name == sent.name } }
        all += headers
        var command = [
            "curl", "-sS", "-i", "--http2", "--max-time", "60", "--cacert", authority.certificate, "-X", method,
        ]
        for (name, value) in all {
            guard let value else { continue }
            command += ["-H", value.isEmpty ? "\(name);" : "\(name): \(value)"]
        }
        command += ["--data-binary", body] + arguments + ["https://localhost:\(port)\(path)"]
        return try Self.run(command)
    }

    static func run(_ command: [String]) throws -> Answer {
        let process = Process()
        process.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        process.arguments = command
        process.standardInput = FileHandle.nullDevice
        let output = Pipe()
        let errors = NSTemporaryDirectory() + "fake-apns-curl-\(UUID().uuidString)"
        _ = FileManager.default.createFile(atPath: errors, contents: nil)
        defer { try? FileManager.default.removeItem(atPath: errors) }
        process.standardOutput = output
        process.standardError = try FileHandle(forWritingTo: URL(fileURLWithPath: errors))
        try process.run()
        let said = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        process.waitUntilExit()
        var answer = Answer(
            exit: process.terminationStatus, status: nil, headers: [:], body: said,
            complaint: try String(contentsOfFile: errors, encoding: .utf8))
        if let end = said.range(of: "\r\n\r\n") {
            let head = said[..<end.lowerBound].components(separatedBy: "\r\n")
            answer.status = head[0].split(separator: " ").dropFirst().first.flatMap { Int($0) }
            for line in head.dropFirst() {
                let parts = line.split(separator: ":", maxSplits: 1)
                answer.headers[String(parts[0])] = parts.count > 1 ? parts[1].trimmingCharacters(in: .whitespaces) : ""
            }
            answer.body = String(said[end.upperBound...])
        }
        return answer
    }
}
