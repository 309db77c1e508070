import Foundation

/// A client that sends what it likes.
public final class PlainClient {
    private let descriptor: Int32

    /// - Parameter host: `127.0.0.1` or `::1`.
    public init(_ host: String, _ port: Int) throws {
        var hints = addrinfo()
        hints.ai_socktype = Int32(SOCK_STREAM.rawValue)
        var found: UnsafeMutablePointer<addrinfo>?
        guard getaddrinfo(host, "\(port)", &hints, &found) == 0, let found else { throw TestFailure("no \(host)") }
        defer { freeaddrinfo(found) }
        descriptor = socket(found.pointee.ai_family, Int32(SOCK_STREAM.rawValue), 0)
        guard connect(descriptor, found.pointee.ai_addr, found.pointee.ai_addrlen) == 0 else {
            throw TestFailure("no connection: \(String(cString: strerror(errno)))")
        }
    }

    public init(_ path: String) throws {
        let descriptor = socket(AF_UNIX, Int32(SOCK_STREAM.rawValue), 0)
        self.descriptor = descriptor
        let connected = Self.withAddress(path) { connect(descriptor, $0, $1) }
        guard connected == 0 else { throw TestFailure("no connection: \(String(cString: strerror(errno)))") }
    }

    deinit { close(descriptor) }

    /// The address of a Unix socket.
    public static func withAddress(_ path: String, _ body: (UnsafePointer<sockaddr>, socklen_t) -> Int32) -> Int32 {
        var address = sockaddr_un()
        address.sun_family = sa_family_t(AF_UNIX)
        withUnsafeMutableBytes(of: &address.sun_path) { $0.copyBytes(from: path.utf8) }
        return withUnsafePointer(to: &address) {
            $0.withMemoryRebound(to: sockaddr.self, capacity: 1) {
                body($0, socklen_t(MemoryLayout<sockaddr_un>.size))
            }
        }
    }

    /// - Returns: Whether the server took it.
    @discardableResult
    public func send(_ text: String) -> Bool {
        let bytes = Array(text.utf8)
        var sent = 0
        while sent < bytes.count {
            let count = bytes[sent...].withUnsafeBytes {
                Glibc.send(descriptor, $0.baseAddress, $0.count, Int32(MSG_NOSIGNAL))
            }
            if count <= 0 { return false }
            sent += count
        }
        return true
    }

    /// What a server on 127.0.0.1 responds to a GET; empty if it does not.
    public static func get(_ path: String, _ port: Int) -> String {
        guard let client = try? PlainClient("127.0.0.1", port) else { return "" }
        client.send("GET \(path) HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return client.read()
    }

    /// Everything until the server closes the connection.
    public func read() -> String {
        var text: [UInt8] = []
        var buffer = [UInt8](repeating: 0, count: 65536)
        while true {
            let count = recv(descriptor, &buffer, buffer.count, 0)
            if count <= 0 { return String(decoding: text, as: UTF8.self) }
            text += buffer.prefix(count)
        }
    }
}
