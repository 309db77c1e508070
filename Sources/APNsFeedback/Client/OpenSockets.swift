internal import CCurl
internal import Glibc

/// The sockets that libcurl has open, and those that it has closed since the last look.
///
/// Belongs to the thread of its multi handle. It outlives the handle, and the handle outlives all connections.
@safe final class OpenSockets {
    private var open: [Int32] = []
    private var closed: [Int32] = []

    /// The pointer by which libcurl's callbacks find this object.
    var address: UnsafeMutableRawPointer { unsafe Unmanaged.passUnretained(self).toOpaque() }

    /// The sockets closed since the last call, in order.
    func takeClosed() -> [Int32] {
        if closed.isEmpty { return [] }
        defer { closed.removeAll(keepingCapacity: true) }
        return closed
    }

    var openCount: Int { open.count }

    /// The open socket with this local port; the latest if there are several.
    func socket(localPort: UInt16) -> Int32? {
        open.last { Self.localPort(of: $0) == localPort }
    }

    /// Holds data back until a packet is full (`TCP_CORK`, tcp(7)), or sends it.
    ///
    /// Sockets opened in the meantime are not held back; releasing them changes nothing.
    func holdBack(_ isHeld: Bool) {
        var value: Int32 = isHeld ? 1 : 0
        for socket in open {
            _ = unsafe setsockopt(
                socket, Int32(IPPROTO_TCP), TCP_CORK, &value, socklen_t(MemoryLayout<Int32>.size))
        }
    }

    /// Ends a connection in both directions: libcurl then fails all requests on it.
    static func shutDown(_ socket: Int32) {
        shutdown(socket, Int32(SHUT_RDWR))
    }

    static let opened: curl_sockopt_callback = { this, socket, purpose in
        guard let this = unsafe this, purpose == CURLSOCKTYPE_IPCXN else { return CURL_SOCKOPT_OK }
        unsafe Unmanaged<OpenSockets>.fromOpaque(this).takeUnretainedValue().open.append(socket)
        return CURL_SOCKOPT_OK
    }

    static let closes: curl_closesocket_callback = { this, socket in
        if let this = unsafe this {
            let log = unsafe Unmanaged<OpenSockets>.fromOpaque(this).takeUnretainedValue()
            if let place = log.open.firstIndex(of: socket) {
                log.open.remove(at: place)
                log.closed.append(socket)
            }
        }
        return close(socket)
    }

    private static func localPort(of socket: Int32) -> UInt16? {
        var address = sockaddr_storage()
        var length = socklen_t(MemoryLayout<sockaddr_storage>.size)
        return unsafe withUnsafeMutablePointer(to: &address) { address in
            let general = unsafe UnsafeMutableRawPointer(address).assumingMemoryBound(to: sockaddr.self)
            guard unsafe getsockname(socket, general, &length) == 0 else { return nil }
            // IPv4 and IPv6 have the port in the same place.
            return unsafe UInt16(
                bigEndian: UnsafeMutableRawPointer(address).assumingMemoryBound(to: sockaddr_in.self).pointee.sin_port)
        }
    }
}
