import Foundation

/// A TCP socket that listens on a free port of 127.0.0.1. Nobody accepts its connections unless its owner does: the kernel completes
/// them, and the peer hears nothing. Closed when it is released.
public final class LoopbackListener: Sendable {
    public let port: Int
    public let socket: Int32

    /// - Parameter setOptions: Called with the socket before it listens: accepted connections inherit its options.
    public init(setOptions: (Int32) -> Void = { _ in }) throws {
        let socket = Glibc.socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        self.socket = socket
        setOptions(socket)
        var address = sockaddr_in(family: AF_INET, port: 0, loopback: ())
        let isListening = withUnsafeMutablePointer(to: &address) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { pointer in
                var length = socklen_t(MemoryLayout<sockaddr_in>.size)
                return bind(socket, pointer, length) == 0 && listen(socket, 64) == 0
                    && getsockname(socket, pointer, &length) == 0
            }
        }
        port = Int(UInt16(bigEndian: address.sin_port))
        guard isListening else { throw TestFailure("cannot listen on 127.0.0.1") }
    }

    deinit { close(socket) }

    /// Accepts no more connections: a thread in `accept` gets an error.
    public func shutDown() { shutdown(socket, Int32(SHUT_RDWR)) }
}
