import FakeAPNs
import Foundation
import LedgerTestSupport

/// A server from Debian's packages, as a group of child processes on a port of 127.0.0.1 with its files in a temporary folder. It ends
/// with this process, even after `kill -9`: a shell that reads from our pipe starts it, and kills it when the pipe closes.
final class ServerProcess {
    let kind: ServerKind
    /// A port outside the range that the kernel assigns by itself: a restarted server needs the same port again.
    let port = Int.random(in: 16_384..<32_768)

    private let folder = NSTemporaryDirectory() + "server-\(UUID().uuidString.prefix(8))"
    private let command: [String]
    /// All servers that were started, each with its shell.
    private var started: [(leader: Int32, shell: Process, lifeline: Pipe)] = []

    /// If this process is root's, servers run as another user: started by root, they would change their user and need other folders.
    private static let asUser =
        getuid() == 0 ? ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] : []

    /// - Parameter backend: The port of what stands behind it, on 127.0.0.1. Nil for a server that answers by itself.
    init(_ kind: ServerKind, _ authority: TestAuthority, before backend: Int? = nil) throws {
        self.kind = kind
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        let certificate = try Data(contentsOf: URL(fileURLWithPath: authority.server.certificate))
        let key = try Data(contentsOf: URL(fileURLWithPath: authority.server.key))
        for (name, data) in [("server.pem", certificate), ("server.key", key), ("both.pem", certificate + key)] {
            try data.write(to: URL(fileURLWithPath: "\(folder)/\(name)"))
        }
        command = try kind.prepare(in: folder, port: port, backend: backend ?? 0)
        if getuid() == 0 { try TestCluster.run(["chown", "-R", "nobody", folder]) }
    }

    deinit {
        killAll()
        for (_, _, lifeline) in started { try? lifeline.fileHandleForWriting.close() }
        for (_, shell, _) in started { shell.waitUntilExit() }
        try? FileManager.default.removeItem(atPath: folder)
    }

    /// Starts it, and returns when it accepts connections.
    func start() throws {
        let shell = Process()
        let (lifeline, told) = (Pipe(), Pipe())
        shell.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        // With -m, a background job has its own process group, which can be killed as a whole.
        let script = """
            set -m
            "$@" </dev/null >>"\(folder)/output" 2>&1 &
            echo $!
            exec >/dev/null
            cat
            kill -KILL -- -$!
            """
        shell.arguments = ["bash", "-c", script, "bash"] + Self.asUser + command
        shell.standardInput = lifeline
        shell.standardOutput = told
        shell.standardError = FileHandle.nullDevice
        try Self.withoutBlockedSignals { try shell.run() }
        let leader = String(decoding: told.fileHandleForReading.availableData, as: UTF8.self)
        guard let leader = Int32(leader.trimmingCharacters(in: .whitespacesAndNewlines)) else {
            throw TestFailure("no process of \(kind.testDescription)")
        }
        started.append((leader, shell, lifeline))
        do {
            try eventually("\(kind.testDescription) accepts connections", within: 20) { accepts }
        } catch {
            throw TestFailure("\(error): \(log)")
        }
    }

    /// Threads of Dispatch block all signals, and so do the threads that they start. A child inherits that, and Apache and nghttpx do
    /// not undo it.
    private static func withoutBlockedSignals(_ body: () throws -> Void) rethrows {
        var none = sigset_t()
        var earlier = sigset_t()
        sigemptyset(&none)
        pthread_sigmask(SIG_SETMASK, &none, &earlier)
        defer { pthread_sigmask(SIG_SETMASK, &earlier, nil) }
        try body()
    }

    /// Sends a signal to its first process, which passes it on if necessary.
    func signal(_ number: Int32) {
        if let leader = started.last?.leader { kill(leader, number) }
    }

    /// Kills all its processes, also those that still finish their streams after a restart.
    func killAll() {
        for (leader, _, _) in started { kill(-leader, SIGKILL) }
    }

    var accepts: Bool {
        let socket = socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        defer { close(socket) }
        var address = sockaddr_in()
        address.sin_family = sa_family_t(AF_INET)
        address.sin_port = in_port_t(port).bigEndian
        address.sin_addr.s_addr = UInt32(0x7F00_0001).bigEndian
        return withUnsafePointer(to: &address) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) {
                connect(socket, $0, socklen_t(MemoryLayout<sockaddr_in>.size)) == 0
            }
        }
    }

    /// Its output so far.
    var log: String {
        ["output", "error.log", "access.log"].map {
            (try? String(contentsOfFile: "\(folder)/\($0)", encoding: .utf8)) ?? ""
        }
        .joined()
    }
}
