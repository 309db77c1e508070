internal import CCurl
internal import TokenModel

/// One request over a connection of its own, made by libcurl alone. For what is asked now and then; pushes to devices go through `PushClient`.
struct SingleRequest {
    struct Response {
        var status: Int32
        /// The names are in lower case.
        var headers: [String: String]
        var body: [UInt8]
    }

    var method: String
    /// Begins with a slash, and has only characters that a URL allows.
    var path: String
    /// Whoever makes the request sees to it that the values have no line ends.
    var headers: [(name: String, value: String)]
    var body: [UInt8]?

    /// What the server has sent.
    private final class Received {
        var headers: [String: String] = [:]
        var body: [UInt8] = []

        static let most = 16 << 20

        static func of(_ user: UnsafeMutableRawPointer?) -> Received? {
            unsafe user.map { unsafe Unmanaged<Received>.fromOpaque($0).takeUnretainedValue() }
        }
    }

    /// Sends it, and waits for the response: at most the time to connect and the time for a response, together. Not repeated.
    func perform(
        at server: PushServer, _ identity: PushIdentity, _ options: PushClientOptions
    ) throws(TLSConnection.Failure) -> Response {
        guard let easy = unsafe curl_easy_init() else { throw TLSConnection.Failure(message: "out of memory") }
        defer { unsafe curl_easy_cleanup(easy) }
        let proxyURL = if case .proxy(let proxy) = options.route { try proxy.url() } else { nil as SecretBytes? }
        unsafe CurlSettings.setProxy(easy, proxyURL, options)
        unsafe CurlSettings.setTrust(easy, options)
        unsafe CurlSettings.setIdentity(easy, identity)
        let list = try unsafe set(easy, server, identity, options)
        defer { unsafe curl_slist_free_all(list) }
        let received = Received()
        let user = unsafe Unmanaged.passUnretained(received).toOpaque()
        unsafe ck_set_receiver(easy, CURLOPT_HEADERFUNCTION, CURLOPT_HEADERDATA, Self.takeHeader, user)
        unsafe ck_set_receiver(easy, CURLOPT_WRITEFUNCTION, CURLOPT_WRITEDATA, Self.takeBody, user)
        let complaint = UnsafeMutablePointer<CChar>.allocate(capacity: Int(CURL_ERROR_SIZE))
        unsafe complaint.initialize(repeating: 0, count: Int(CURL_ERROR_SIZE))
        defer { unsafe complaint.deallocate() }
        unsafe ck_set_pointer(easy, CURLOPT_ERRORBUFFER, complaint)
        let code = unsafe curl_easy_perform(easy)
        guard code == CURLE_OK else {
            let words = unsafe TLSConnection.refusal(code, complaint, options.route.proxyName)
            throw TLSConnection.Failure(message: "\(server.host):\(server.port): \(words)")
        }
        var status = 0
        unsafe ck_get_long(easy, CURLINFO_RESPONSE_CODE, &status)
        return withExtendedLifetime((received, identity)) {
            Response(status: Int32(truncatingIfNeeded: status), headers: received.headers, body: received.body)
        }
    }

    /// - Returns: The headers, which libcurl reads where they are.
    private func set(
        _ easy: UnsafeMutableRawPointer, _ server: PushServer, _ identity: PushIdentity, _ options: PushClientOptions
    ) throws(TLSConnection.Failure) -> UnsafeMutablePointer<curl_slist>? {
        unsafe ck_set_text(easy, CURLOPT_URL, "https://\(server.hostInURL):\(server.port)\(path)")
        unsafe ck_set_text(easy, CURLOPT_PROTOCOLS_STR, "https")
        unsafe ck_set_long(easy, CURLOPT_HTTP_VERSION, Int(CURL_HTTP_VERSION_2TLS))
        unsafe ck_set_long(easy, CURLOPT_SSLVERSION, Int(CURL_SSLVERSION_TLSv1_2))
        unsafe ck_set_long(easy, CURLOPT_NOSIGNAL, 1)
        // Those of a proxy are not the server's.
        unsafe ck_set_long(easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1)
        unsafe ck_set_long(easy, CURLOPT_CONNECTTIMEOUT_MS, Int(options.connectTimeout.wholeMilliseconds))
        let limit = options.connectTimeout + options.answerTimeout
        unsafe ck_set_long(easy, CURLOPT_TIMEOUT_MS, Int(limit.wholeMilliseconds))
        unsafe ck_set_text(easy, CURLOPT_CUSTOMREQUEST, method)
        if let body {
            unsafe ck_set_long(easy, CURLOPT_POSTFIELDSIZE, body.count)
            unsafe body.withUnsafeBytes { bytes in
                _ = unsafe ck_set_pointer(
                    easy, CURLOPT_COPYPOSTFIELDS, UnsafeMutableRawPointer(mutating: bytes.baseAddress))
            }
        }
        var lines = headers.map { "\($0.name): \($0.value)" } + ["content-type: application/json"]
        if let authorization = identity.authorization {
            do { lines.append("authorization: bearer \(try authorization())") } catch {
                throw TLSConnection.Failure(message: "\(error)")
            }
        }
        var list: UnsafeMutablePointer<curl_slist>?
        for line in lines { unsafe list = curl_slist_append(list, line) }
        unsafe ck_set_pointer(easy, CURLOPT_HTTPHEADER, list)
        return unsafe list
    }

    private static let takeHeader: ck_receiver = { bytes, size, count, user in
        let line = unsafe String(decoding: UnsafeRawBufferPointer(start: bytes, count: size * count), as: UTF8.self)
        // What came before was an informational response.
        if line.hasPrefix("HTTP/") { unsafe Received.of(user)?.headers = [:] }
        let parts = line.split(separator: ":", maxSplits: 1)
        if parts.count == 2 {
            let value = parts[1].trimmingPrefix(while: \.isWhitespace)
            unsafe Received.of(user)?.headers[parts[0].lowercased()] = String(value.prefix { !$0.isNewline })
        }
        return size * count
    }

    private static let takeBody: ck_receiver = { bytes, size, count, user in
        guard let received = unsafe Received.of(user), received.body.count + size * count <= Received.most else {
            return 0
        }
        unsafe received.body.append(contentsOf: UnsafeRawBufferPointer(start: bytes, count: size * count))
        return size * count
    }
}
