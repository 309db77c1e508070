import Foundation
import Synchronization

/// A TCP proxy in front of PostgreSQL that cuts connections at the worst moments: just before a COMMIT arrives, just before its
/// reply goes back, or just after.
public final class CuttingProxy: Sendable {
    public var port: Int { listener.port }
    /// How many connections were cut at each of the three moments.
    public let interruptions = Mutex([0, 0, 0])

    /// The port of the server.
    private let server: Atomic<Int>
    private let listener: LoopbackListener
    private let chance: Mutex<SeededChance>
    private let interruptionsNow = Atomic(true)
    /// How often all connections were cut.
    private let cuts = Atomic(0)
    private let holdsReplies = Atomic(false)

    /// `COMMIT` as a simple query: type, length, text, NUL.
    private static let commit: [UInt8] = [UInt8(ascii: "Q"), 0, 0, 0, 11] + Array("COMMIT".utf8) + [0]

    public init(to server: Int, seed: UInt64) throws {
        self.server = Atomic(server)
        chance = Mutex(SeededChance(seed: seed))
        listener = try LoopbackListener()
        Thread.detachNewThread { [self] in
            while true {
                let client = accept(listener.socket, nil, nil)
                if client < 0 { return }
                Thread.detachNewThread { self.carry(client) }
            }
        }
    }

    /// New connections lead to this port from now on. Call `cut` for the others.
    public func lead(to port: Int) { server.store(port, ordering: .releasing) }

    /// From now on, cuts connections again.
    public func misbehave() { interruptionsNow.store(true, ordering: .releasing) }

    /// From now on, cuts no more connections.
    public func behave() { interruptionsNow.store(false, ordering: .releasing) }

    /// Cuts all connections. A server that waits in a COMMIT does not notice.
    public func cut() { cuts.add(1, ordering: .acquiringAndReleasing) }

    /// Whether to hold the reply to a COMMIT back.
    public func holdReplies(_ holds: Bool) { holdsReplies.store(holds, ordering: .releasing) }

    public func close() { listener.shutDown() }

    private func carry(_ client: Int32) {
        let cutsBefore = cuts.load(ordering: .acquiring)
        defer { Glibc.close(client) }
        let upstream = socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        defer { Glibc.close(upstream) }
        var address = sockaddr_in(family: AF_INET, port: server.load(ordering: .acquiring), loopback: ())
        let connected = withUnsafePointer(to: &address) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) {
                connect(upstream, $0, socklen_t(MemoryLayout<sockaddr_in>.size)) == 0
            }
        }
        guard connected else { return }
        var cutBeforeReply = false
        var cutAfterReply = false
        var bytes = [UInt8](repeating: 0, count: 65536)
        while true {
            var watched = [
                pollfd(fd: client, events: Int16(POLLIN), revents: 0),
                pollfd(fd: upstream, events: Int16(POLLIN), revents: 0),
            ]
            guard poll(&watched, 2, 50) >= 0, cuts.load(ordering: .acquiring) == cutsBefore else { return }
            if watched[0].revents != 0 {
                let count = recv(client, &bytes, bytes.count, 0)
                guard count > 0 else { return }
                if Array(bytes[0..<count]) == Self.commit, interruptionsNow.load(ordering: .acquiring) {
                    switch chance.withLock({ Int.random(in: 0..<15, using: &$0) }) {
                    case 0:
                        interruptions.withLock { $0[0] += 1 }
                        return
                    case 1: cutBeforeReply = true
                    case 2: cutAfterReply = true
                    default: break
                    }
                }
                let isCommit = Array(bytes[0..<count]) == Self.commit
                guard forward(bytes, count, to: upstream) else { return }
                while isCommit, holdsReplies.load(ordering: .acquiring) { usleep(1000) }
            }
            if watched[1].revents != 0 {
                let count = recv(upstream, &bytes, bytes.count, 0)
                guard count > 0 else { return }
                if cutBeforeReply {
                    interruptions.withLock { $0[1] += 1 }
                    return
                }
                guard forward(bytes, count, to: client) else { return }
                if cutAfterReply {
                    interruptions.withLock { $0[2] += 1 }
                    return
                }
            }
        }
    }

    private func forward(_ bytes: [UInt8], _ count: Int, to other: Int32) -> Bool {
        var sent = 0
        while sent < count {
            let more = bytes.withUnsafeBytes { send(other, $0.baseAddress! + sent, count - sent, Int32(MSG_NOSIGNAL)) }
            guard more > 0 else { return false }
            sent += more
        }
        return true
    }
}
