internal import CCurl
internal import Glibc
internal import TokenModel

/// A TLS connection that libcurl opens, and that carries bytes. libcurl does everything before: name resolution, IPv6 and IPv4 (happy
/// eyeballs), proxies, the handshake, verification, time limits. `MultiHandle` connects it and reports when it is open.
///
/// Belongs to one thread. libcurl keeps pointers to the key and to this object's memory, so they are freed after the handle. The
/// handle stays in its multi handle as long as the connection lives: removing it closes the connection.
@safe final class TLSConnection {
    /// Why no attempt to connect can be made.
    struct Failure: Error {
        /// One line, without secrets.
        let message: String
    }

    let number: Int
    let server: PushServer
    let easy: UnsafeMutableRawPointer
    private let complaint = UnsafeMutablePointer<CChar>.allocate(capacity: Int(CURL_ERROR_SIZE))
    private let trace: TraceSink?
    /// libcurl reads the key from here: its own copy would not be wiped.
    private let keyPEM: SecretBytes?
    private(set) var socket: Int32 = -1

    /// The proxy, as error messages name it.
    private let proxyName: String?

    /// - Throws: If libcurl has no memory, or the proxy's password cannot be read.
    init(
        _ number: Int, to server: PushServer, identity: PushIdentity, options: PushClientOptions, trace: TraceSink?
    ) throws(Failure) {
        let proxyURL = if case .proxy(let proxy) = options.route { try proxy.url() } else { nil as SecretBytes? }
        guard let easy = unsafe curl_easy_init() else { throw Failure(message: "out of memory") }
        unsafe self.easy = easy
        self.number = number
        self.server = server
        self.trace = trace
        keyPEM = identity.keyPEM
        proxyName = options.route.proxyName
        unsafe complaint.initialize(repeating: 0, count: Int(CURL_ERROR_SIZE))
        unsafe ck_set_pointer(easy, CURLOPT_PRIVATE, Unmanaged.passUnretained(self).toOpaque())
        unsafe ck_set_pointer(easy, CURLOPT_ERRORBUFFER, complaint)
        setConnection(server, options)
        unsafe CurlSettings.setProxy(easy, proxyURL, options)
        setTLS()
        unsafe CurlSettings.setTrust(easy, options)
        unsafe CurlSettings.setIdentity(easy, identity)
        setTrace()
    }

    deinit {
        unsafe curl_easy_cleanup(easy)
        unsafe complaint.deallocate()
    }

    /// Finds the connection of a libcurl handle.
    static func of(_ easy: UnsafeMutableRawPointer) -> TLSConnection? {
        var found: UnsafeMutableRawPointer?
        guard unsafe ck_get_pointer(easy, CURLINFO_PRIVATE, &found) == CURLE_OK, let found = unsafe found else {
            return nil
        }
        return unsafe Unmanaged<TLSConnection>.fromOpaque(found).takeUnretainedValue()
    }

    private func setConnection(_ server: PushServer, _ options: PushClientOptions) {
        unsafe ck_set_text(easy, CURLOPT_URL, "https://\(server.hostInURL):\(server.port)/")
        unsafe ck_set_text(easy, CURLOPT_PROTOCOLS_STR, "https")
        unsafe ck_set_long(easy, CURLOPT_CONNECT_ONLY, 1)
        unsafe ck_set_long(easy, CURLOPT_FRESH_CONNECT, 1)
        unsafe ck_set_long(easy, CURLOPT_NOSIGNAL, 1)
        // Does not wait for the thread that resolves a name: a broken DNS would delay the shutdown.
        unsafe ck_set_long(easy, CURLOPT_QUICK_EXIT, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_NODELAY, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPALIVE, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPIDLE, 60)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPINTVL, 20)
        unsafe ck_set_long(easy, CURLOPT_CONNECTTIMEOUT_MS, Int(options.connectTimeout.wholeMilliseconds))
    }

    private func setTLS() {
        // With its own ALPN, libcurl 7.88 would begin an HTTP/2 session itself.
        unsafe ck_set_long(easy, CURLOPT_SSL_ENABLE_ALPN, 0)
        unsafe ck_set_tls_setup(easy)
    }

    private func setTrace() {
        guard let trace else { return }
        unsafe ck_set_pointer(easy, CURLOPT_DEBUGDATA, Unmanaged.passUnretained(trace).toOpaque())
        unsafe ck_set_trace(easy, TraceSink.callback)
        unsafe ck_set_long(easy, CURLOPT_VERBOSE, 1)
    }

    /// Why no connection could be made, in one line.
    func refusal(_ code: CURLcode) -> String { unsafe Self.refusal(code, complaint, proxyName) }

    /// Names the proxy, if there is one: libcurl's message does not always say which of the two connections it means.
    static func refusal(_ code: CURLcode, _ complaint: UnsafePointer<CChar>, _ proxyName: String?) -> String {
        let message = unsafe message(code, complaint)
        return proxyName.map { "\(message) (through \($0))" } ?? message
    }

    private func message(_ code: CURLcode) -> String { unsafe Self.message(code, complaint) }

    /// libcurl's error message, in one line.
    private static func message(_ code: CURLcode, _ complaint: UnsafePointer<CChar>) -> String {
        let text = unsafe complaint[0] == 0 ? String(cString: curl_easy_strerror(code)) : String(cString: complaint)
        // libcurl would repeat the proxy with its password.
        if text.hasPrefix("Unsupported proxy") { return "libcurl does not support this proxy" }
        return text.split(whereSeparator: \.isNewline).joined(separator: "; ")
    }

    // MARK: - Bytes

    /// How many unsent bytes the kernel may hold. With more, the time limit for a response would begin long before the request leaves
    /// on a slow line (`TCP_NOTSENT_LOWAT`, tcp(7)).
    private static let mostUnsent: Int32 = 64 << 10

    /// Call it once the handshake is complete.
    func opened() {
        unsafe ck_get_socket(easy, &socket)
        var value = Self.mostUnsent
        // Glibc's header for Swift does not have the name.
        let notSentLowWater: Int32 = 25
        _ = unsafe setsockopt(
            socket, Int32(IPPROTO_TCP), notSentLowWater, &value, socklen_t(MemoryLayout<Int32>.size))
    }

    enum Transferred {
        case bytes(Int)
        /// Nothing can be read or written now.
        case again
        /// The connection has ended; why, in one line.
        case ended(String)
    }

    func receive(into buffer: UnsafeMutableRawBufferPointer) -> Transferred {
        var count = 0
        let code = unsafe curl_easy_recv(easy, buffer.baseAddress, buffer.count, &count)
        if code == CURLE_AGAIN { return .again }
        if code != CURLE_OK { return .ended(message(code)) }
        return count > 0 ? .bytes(count) : .ended("the server closed the connection")
    }

    /// After `again`, the next call must begin with the same bytes.
    func send(_ bytes: UnsafeRawBufferPointer) -> Transferred {
        var count = 0
        let code = unsafe curl_easy_send(easy, bytes.baseAddress, bytes.count, &count)
        if code == CURLE_AGAIN { return .again }
        return code == CURLE_OK ? .bytes(count) : .ended(message(code))
    }

    /// Whether ALPN chose HTTP/2. Known after the first `receive`.
    var hasAgreedOnHTTP2: Bool { unsafe ck_has_agreed_on_h2(easy) != 0 }

    /// Whether the last call returned `again` because the socket cannot be written to.
    var waitsForWriting: Bool { unsafe ck_waits_for_writing(easy) != 0 }
}
