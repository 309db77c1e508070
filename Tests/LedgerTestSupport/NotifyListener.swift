import Foundation

/// Listens on NOTIFY_SOCKET like systemd.
public final class NotifyListener: @unchecked Sendable {  // The messages are behind the lock.
    /// The value of NOTIFY_SOCKET.
    public let address: String
    private let descriptor: Int32
    private let lock = NSLock()
    private var received: [[String]] = []

    /// - Parameter reads: False to leave datagrams unread until `read` is called.
    public init(abstract: Bool = false, reads: Bool = true) throws {
        let name = "tokenkeeperd-\(UUID().uuidString)"
        address = abstract ? "@\(name)" : NSTemporaryDirectory() + name
        descriptor = socket(AF_UNIX, Int32(SOCK_DGRAM.rawValue), 0)
        var here = sockaddr_un()
        here.sun_family = sa_family_t(AF_UNIX)
        withUnsafeMutableBytes(of: &here.sun_path) { path in
            path.copyBytes(from: Array(address.utf8))
            if abstract { path[0] = 0 }
        }
        let length = socklen_t(MemoryLayout<sa_family_t>.size + address.utf8.count + (abstract ? 0 : 1))
        let bound = withUnsafePointer(to: &here) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { bind(descriptor, $0, length) }
        }
        guard bound == 0 else { throw TestFailure("cannot listen at \(address)") }
        if reads { read() }
    }

    /// Reads datagrams from now on.
    public func read() {
        let thread = Thread { [descriptor, weak self] in
            var buffer = [UInt8](repeating: 0, count: 4096)
            while true {
                let length = recv(descriptor, &buffer, buffer.count, 0)
                guard length > 0, let self else { return }
                let lines = String(decoding: buffer[..<length], as: UTF8.self).split(separator: "\n").map(String.init)
                self.lock.withLock { self.received.append(lines) }
            }
        }
        thread.start()
    }

    deinit {
        shutdown(descriptor, Int32(SHUT_RDWR))
        close(descriptor)
        unlink(address)
    }

    /// Fills the socket: the next sender has to wait until it is read.
    public func fill() {
        let sender = socket(AF_UNIX, Int32(SOCK_DGRAM.rawValue), 0)
        defer { close(sender) }
        var here = sockaddr_un()
        var length = socklen_t(MemoryLayout<sockaddr_un>.size)
        withUnsafeMutablePointer(to: &here) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { pointer in
                _ = getsockname(descriptor, pointer, &length)
                while sendto(sender, "FILL=1", 6, Int32(MSG_DONTWAIT), pointer, length) > 0 {}
            }
        }
    }

    /// All assignments so far, in order.
    public var assignments: [String] { lock.withLock { received.flatMap { $0 } } }

    /// The datagrams, each with its assignments.
    public var messages: [[String]] { lock.withLock { received } }

    /// The last status.
    public var status: String {
        assignments.last { $0.hasPrefix("STATUS=") }.map { String($0.dropFirst(7)) } ?? ""
    }

    public func count(_ assignment: String) -> Int { assignments.count { $0 == assignment } }
}
