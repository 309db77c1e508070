import Foundation
import Synchronization

/// A TCP relay on 127.0.0.1 with a limited rate in each direction, which all connections share. Its segments are as small as on the
/// internet, and its buffers are small, so that a sender that is too fast soon finds its own socket full.
public final class SlowLink: Sendable {
    public var port: Int { listener.port }

    private let server: Int
    private let listener: LoopbackListener
    private let (up, down): (Direction, Direction)

    /// The bytes of TCP segments over Ethernet.
    private static let segment: Int32 = 1460
    /// The size of the kernel's buffers on the client's side. Linux doubles it.
    private static let buffer: Int32 = 16 << 10

    /// - Parameter rate: Bytes per second in each direction: 1 or more.
    public init(to server: Int, rate: Int) throws {
        self.server = server
        (up, down) = (Direction(rate), Direction(rate))
        listener = try LoopbackListener { socket in
            Self.set(socket, SOL_SOCKET, SO_RCVBUF, Self.buffer)
            Self.set(socket, SOL_SOCKET, SO_SNDBUF, Self.buffer)
            Self.set(socket, Int32(IPPROTO_TCP), TCP_MAXSEG, Self.segment)
        }
        Thread.detachNewThread { [self] in
            while true {
                let client = accept(listener.socket, nil, nil)
                if client < 0 { return }
                connect(client)
            }
        }
    }

    /// How many pieces of at most a segment's size have passed, in both directions.
    public var segments: Int { up.segments.load(ordering: .relaxed) + down.segments.load(ordering: .relaxed) }

    /// Accepts no more connections. Those that are open go on until one of their ends closes.
    public func close() { listener.shutDown() }

    private func connect(_ client: Int32) {
        let upstream = socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        var address = sockaddr_in(family: AF_INET, port: server, loopback: ())
        let connected = withUnsafePointer(to: &address) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) {
                Glibc.connect(upstream, $0, socklen_t(MemoryLayout<sockaddr_in>.size)) == 0
            }
        }
        for end in [client, upstream] { Self.set(end, Int32(IPPROTO_TCP), TCP_NODELAY, 1) }
        let ends = Ends(client, upstream)
        guard connected else { return }
        Thread.detachNewThread { [self] in up.carry(from: client, to: upstream, ends) }
        Thread.detachNewThread { [self] in down.carry(from: upstream, to: client, ends) }
    }

    private static func set(_ socket: Int32, _ level: Int32, _ option: Int32, _ value: Int32) {
        var value = value
        setsockopt(socket, level, option, &value, socklen_t(MemoryLayout<Int32>.size))
    }

    /// The two sockets of a connection: closed when both directions have ended.
    private final class Ends: Sendable {
        let sockets: [Int32]

        init(_ one: Int32, _ other: Int32) { sockets = [one, other] }

        deinit { for socket in sockets { Glibc.close(socket) } }

        func shutDown() { for socket in sockets { shutdown(socket, Int32(SHUT_RDWR)) } }
    }

    /// One direction of the link: a token bucket.
    private final class Direction: Sendable {
        let segments = Atomic(0)
        private let rate: Int
        /// When the link has carried everything that was given to it.
        private let freeAt = Mutex(ContinuousClock.now)

        /// So much may be caught up after a pause or a sleep that took too long.
        private static let burst = Duration.milliseconds(10)

        init(_ rate: Int) { self.rate = rate }

        func carry(from one: Int32, to other: Int32, _ ends: Ends) {
            var bytes = [UInt8](repeating: 0, count: Int(SlowLink.segment))
            while true {
                let count = recv(one, &bytes, bytes.count, 0)
                guard count > 0 else { break }
                segments.add(1, ordering: .relaxed)
                wait(for: count)
                var sent = 0
                while sent < count {
                    let more = bytes.withUnsafeBytes {
                        send(other, $0.baseAddress! + sent, count - sent, Int32(MSG_NOSIGNAL))
                    }
                    guard more > 0 else { return ends.shutDown() }
                    sent += more
                }
            }
            ends.shutDown()
        }

        private func wait(for count: Int) {
            let now = ContinuousClock.now
            let until = freeAt.withLock { freeAt in
                freeAt = max(freeAt, now - Self.burst) + .seconds(Double(count) / Double(rate))
                return freeAt
            }
            if until > now { usleep(useconds_t((until - now) / .microseconds(1))) }
        }
    }
}
