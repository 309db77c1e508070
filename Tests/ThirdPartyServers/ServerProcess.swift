import FakeAPNs
import Foundation
import LedgerTestSupport

/// A server of Debian's, as a group of child processes on a port of 127.0.0.1 and with its files in a temporary folder. It ends when
/// this process does, also after a `kill -9`: it stands beside a shell that reads from a pipe of ours.
final class ServerProcess {
    let kind: ServerKind
    /// Of a range from which the kernel gives to nobody by itself: a server that is started again needs it again.
    let port = Int.random(in: 16_384..<32_768)

    private let folder = NSTemporaryDirectory() + "server-\(UUID().uuidString.prefix(8))"
    private let command: [String]
    /// All that were started, with the shell beside each.
    private var started: [(leader: Int32, shell: Process, lifeline: Pipe)] = []

    /// Root gives itself up: servers that are started by root change their user and expect more of their folders.
    private static let asUser =
        getuid() == 0 ? ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] : []

    init(_ kind: ServerKind, _ authority: TestAuthority, before backend: Backend) throws {
        self.kind = kind
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        let certificate = try Data(contentsOf: URL(fileURLWithPath: authority.server.certificate))
        let key = try Data(contentsOf: URL(fileURLWithPath: authority.server.key))
        for (name, data) in [("server.pem", certificate), ("server.key", key), ("both.pem", certificate + key)] {
            try data.write(to: URL(fileURLWithPath: "\(folder)/\(name)"))
        }
        command = try kind.prepare(in: folder, port: port, backend: backend.port)
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
        // With -m, what runs in the background has a process group of its own, which is killed as a whole.
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

    /// Threads of Dispatch, and those that they make, block all signals. A child inherits that, and Apache and nghttpx do not lift it.
    private static func withoutBlockedSignals(_ body: () throws -> Void) rethrows {
        var none = sigset_t()
        var earlier = sigset_t()
        sigemptyset(&none)
        pthread_sigmask(SIG_SETMASK, &none, &earlier)
        defer { pthread_sigmask(SIG_SETMASK, &earlier, nil) }
        try body()
    }

    /// To its first process, which passes it on as it sees fit.
    func signal(_ number: Int32) {
        if let leader = started.last?.leader { kill(leader, number) }
    }

    /// Ends all its processes at once, also those that still end their streams after a restart.
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

    /// What it has written so far.
    var log: String {
        ["output", "error.log"].map { (try? String(contentsOfFile: "\(folder)/\($0)", encoding: .utf8)) ?? "" }
            .joined()
    }
}
