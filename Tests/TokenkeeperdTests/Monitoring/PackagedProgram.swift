import Foundation
import LedgerTestSupport

/// A program from Debian's packages that watches daemons or the database, as a child process with its files in a temporary folder. It ends
/// with this process, even after `kill -9`: a shell that reads from our pipe starts it, and kills it when the pipe closes.
final class PackagedProgram {
    /// It listens on this port of 127.0.0.1.
    let port: Int

    private let folder: TemporaryDirectory
    private let shell = Process()
    private let lifeline = Pipe()

    /// Starts it, and returns when it accepts connections.
    ///
    /// - Parameters:
    ///   - name: As in Debian's packages, such as `prometheus`.
    ///   - port: A free one if nil.
    ///   - files: By their names in the folder.
    ///   - arguments: Made from the folder and the port.
    init(
        _ name: String, port: Int? = nil, files: [String: String],
        arguments: (_ folder: String, _ port: Int) -> [String]
    ) throws {
        let (program, folder, port) = (
            try Self.find(name), try TemporaryDirectory(), try port ?? TestCluster.freePort()
        )
        (self.folder, self.port) = (folder, port)
        for (name, text) in files {
            try text.write(toFile: "\(folder.path)/\(name)", atomically: false, encoding: .utf8)
        }
        shell.executableURL = URL(fileURLWithPath: "/bin/sh")
        let script = #""$@" </dev/null >"$0" 2>&1 & cat >/dev/null; kill -KILL $!"#
        shell.arguments = ["-c", script, "\(folder.path)/log", program] + arguments(folder.path, port)
        shell.standardInput = lifeline
        shell.standardOutput = FileHandle.nullDevice
        shell.standardError = FileHandle.nullDevice
        try shell.run()
        do {
            try eventually("\(name) accepts connections", within: 60) {
                (try? PlainClient("127.0.0.1", port)) != nil
            }
        } catch {
            throw TestFailure("\(error): \(log)")
        }
    }

    deinit {
        // A process that was started meanwhile may have the pipe, too.
        try? signal(SIGKILL)
        try? lifeline.fileHandleForWriting.close()
        shell.waitUntilExit()
    }

    func signal(_ number: Int32) throws {
        for id in try TestCluster.run(["pgrep", "-P", "\(shell.processIdentifier)"]).split(separator: "\n") {
            if let id = Int32(id) { kill(id, number) }
        }
    }

    /// The body of its response to a GET; empty if there is none.
    func get(_ path: String) -> String {
        guard let client = try? PlainClient("127.0.0.1", port) else { return "" }
        client.send("GET \(path) HTTP/1.0\r\nHost: localhost\r\n\r\n")
        return client.read().split(separator: "\r\n\r\n", maxSplits: 1).dropFirst().joined()
    }

    var log: String { (try? String(contentsOfFile: "\(folder.path)/log", encoding: .utf8)) ?? "" }

    /// The path of a program: below `.build/servers`, where `scripts/setup servers` puts it, or where Debian installs it.
    static func find(_ name: String) throws -> String {
        let roots = [repository.appendingPathComponent(".build/servers").path, ""]
        let places = roots.flatMap { ["\($0)/usr/bin/\(name)", "\($0)/usr/sbin/\(name)"] }
        guard let place = places.first(where: FileManager.default.fileExists(atPath:)) else {
            throw TestFailure("\(name) is neither installed nor below .build/servers; run: scripts/setup servers")
        }
        return place
    }

    static let repository = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
        .appendingPathComponent("../../..").standardized

    /// A file of the folder `monitoring`.
    static func monitoring(_ name: String) throws -> String {
        try String(contentsOf: repository.appendingPathComponent("monitoring/\(name)"), encoding: .utf8)
    }
}
