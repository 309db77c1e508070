internal import Glibc

/// The socket on which systemd listens to a service of Type=notify.
///
/// https://www.freedesktop.org/software/systemd/man/sd_notify.html
struct NotifySocket: Sendable {
    private let path: [UInt8]

    /// - Parameter path: The variable NOTIFY_SOCKET: a path, or with `@` in front a name in the abstract namespace.
    ///   Nil, an empty value or anything else means that systemd does not listen.
    init?(_ path: String?) {
        // The 108 bytes of sun_path; a path in the file system ends with a zero.
        guard let path, path.hasPrefix("/") || path.hasPrefix("@"),
            (2...(path.hasPrefix("@") ? 108 : 107)).contains(path.utf8.count)
        else { return nil }
        self.path = Array(path.utf8)
    }

    /// Sends assignments, such as `READY=1`, in one datagram; never waits.
    ///
    /// - Returns: False if another try may succeed: systemd has not yet read the earlier datagrams.
    func send(_ assignments: [String]) -> Bool {
        let descriptor = socket(AF_UNIX, Int32(SOCK_DGRAM.rawValue | SOCK_CLOEXEC.rawValue), 0)
        guard descriptor >= 0 else { return false }
        defer { close(descriptor) }
        var address = sockaddr_un()
        address.sun_family = sa_family_t(AF_UNIX)
        unsafe withUnsafeMutableBytes(of: &address.sun_path) { name in
            unsafe name.copyBytes(from: path)
            if path[0] == UInt8(ascii: "@") { unsafe name[0] = 0 }
        }
        // The length matters: in the abstract namespace, zeros after the name would belong to it.
        let length = MemoryLayout<sa_family_t>.size + path.count + (path[0] == UInt8(ascii: "@") ? 0 : 1)
        let message = Array(assignments.joined(separator: "\n").utf8)
        let sent = unsafe withUnsafePointer(to: &address) { pointer in
            unsafe pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { pointer in
                unsafe sendto(
                    descriptor, message, message.count, Int32(MSG_NOSIGNAL) | Int32(MSG_DONTWAIT),
                    pointer, socklen_t(length))
            }
        }
        return sent >= 0 || (errno != EAGAIN && errno != ENOBUFS)
    }
}
