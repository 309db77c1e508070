internal import CCurl
internal import Glibc
internal import TokenModel

/// What libcurl's callbacks ask and tell a client's loop. Called on the loop's thread, from within libcurl.
protocol TransferWatcher: AnyObject {
    /// Whether the request may use this connection now.
    func mayGo(_ transfer: Transfer, on name: ConnectionTable.Name) -> Bool
    /// A part of the response has arrived.
    func heard(_ transfer: Transfer)
}

/// libcurl's handle for one request at a time, with the memory that libcurl reads the request from, and the response.
///
/// Belongs to one thread. libcurl keeps pointers to the lines, the payload, the key and this object, so they are freed after the
/// handle.
@safe final class Transfer {
    let easy: UnsafeMutableRawPointer
    unowned let watcher: any TransferWatcher

    /// The current request; nil if there is none.
    var delivery: Delivery?
    var answer = ResponseParser()
    /// The connection that carries the request in this turn.
    var connection: ConnectionTable.Name?
    /// Why the request was not allowed to use the connection that libcurl assigned.
    var obstacle: Obstacle?
    /// When libcurl got the request, and when it was sent.
    var handedAt = ContinuousClock.now
    var wentAt: ContinuousClock.Instant?

    enum Obstacle {
        /// The connection has a request and has not responded yet, or it is about to be closed.
        case notYet
        /// The connection does not use HTTP/2.
        case notHTTP2
        /// The request was sent often enough.
        case often
    }

    private var lines: UnsafeMutablePointer<CChar>
    private var linesCapacity = 1024
    private let headers = UnsafeMutablePointer<curl_slist>.allocate(capacity: RequestText.mostHeaders)
    private var payload: UnsafeMutablePointer<UInt8>
    private var payloadCapacity = 512
    private let complaint = UnsafeMutablePointer<CChar>.allocate(capacity: Int(CURL_ERROR_SIZE))
    private let trace: TraceSink?
    /// libcurl reads the key from here for each connection: its own copy would not be wiped.
    private let keyPEM: SecretBytes?

    /// - Returns: Nil if libcurl has no memory.
    init?(_ watcher: any TransferWatcher, sockets: OpenSockets, identity: PushIdentity, options: PushClientOptions) {
        guard let easy = unsafe curl_easy_init() else { return nil }
        unsafe self.easy = easy
        self.watcher = watcher
        unsafe lines = .allocate(capacity: linesCapacity)
        unsafe payload = .allocate(capacity: payloadCapacity)
        trace = options.trace.map(TraceSink.init)
        keyPEM = identity.keyPEM
        unsafe complaint.initialize(repeating: 0, count: Int(CURL_ERROR_SIZE))
        setConnection(sockets, identity, options)
        setExchange()
        setTrace()
    }

    deinit {
        unsafe curl_easy_cleanup(easy)
        unsafe lines.deallocate()
        unsafe payload.deallocate()
        unsafe headers.deallocate()
        unsafe complaint.deallocate()
    }

    /// Finds the transfer of a libcurl handle.
    static func of(_ easy: UnsafeMutableRawPointer) -> Transfer? {
        var found: UnsafeMutableRawPointer?
        guard unsafe ck_get_pointer(easy, CURLINFO_PRIVATE, &found) == CURLE_OK, let found = unsafe found else {
            return nil
        }
        return unsafe Unmanaged<Transfer>.fromOpaque(found).takeUnretainedValue()
    }

    /// Writes a request where libcurl reads it.
    func load(_ text: RequestText, payload body: [UInt8]) {
        if text.bytes.count > linesCapacity {
            unsafe lines.deallocate()
            linesCapacity = text.bytes.count * 2
            unsafe lines = .allocate(capacity: linesCapacity)
        }
        if body.count > payloadCapacity {
            unsafe payload.deallocate()
            payloadCapacity = max(body.count, payloadCapacity * 2)
            unsafe payload = .allocate(capacity: payloadCapacity)
        }
        unsafe text.bytes.withUnsafeBytes { bytes in
            unsafe UnsafeMutableRawPointer(lines).copyMemory(from: bytes.baseAddress!, byteCount: bytes.count)
        }
        unsafe body.withUnsafeBytes { bytes in
            guard let start = bytes.baseAddress else { return }
            unsafe UnsafeMutableRawPointer(payload).copyMemory(from: start, byteCount: bytes.count)
        }
        let count = text.starts.count - 1
        precondition(1...RequestText.mostHeaders ~= count)
        for place in 0..<count {
            let next = unsafe place + 1 < count ? headers + place + 1 : nil
            unsafe (headers + place).initialize(to: curl_slist(data: lines + text.starts[place + 1], next: next))
        }
        // libcurl copies the URL and nothing else.
        unsafe ck_set_text(easy, CURLOPT_URL, lines + text.starts[0])
        unsafe ck_set_headers(easy, headers)
        unsafe ck_set_size(easy, CURLOPT_POSTFIELDSIZE_LARGE, curl_off_t(body.count))
        unsafe ck_set_pointer(easy, CURLOPT_POSTFIELDS, payload)
        unsafe complaint[0] = 0
        answer.clear()
        connection = nil
        obstacle = nil
        wentAt = nil
    }

    /// libcurl's error message, in one line.
    func message(_ code: CURLcode) -> String {
        let text = unsafe complaint[0] == 0 ? String(cString: curl_easy_strerror(code)) : String(cString: complaint)
        return text.split(whereSeparator: \.isNewline).joined(separator: "; ")
    }

    /// What came of the request in this turn.
    ///
    /// - Parameter host: The server, for messages.
    func turn(_ code: CURLcode, host: String) -> Delivery.Turn {
        switch obstacle {
        case .notHTTP2: .failure(.protocolError, message: "\(host) does not support HTTP/2", wasSent: false)
        case .often: .failure(.connectionLost, message: "the connection was lost again", wasSent: true)
        case .notYet, nil: turn(code)
        }
    }

    private func turn(_ code: CURLcode) -> Delivery.Turn {
        let wasSent = connection != nil
        if let head = answer.answer, wasSent {
            guard answer.isHTTP2 else {
                return .failure(.protocolError, message: "the response does not use HTTP/2", wasSent: false)
            }
            if code == CURLE_OK { return .answer(head, isTorn: answer.isTorn) }
            // Accepted is accepted, whatever happens to the rest.
            if head.status == 200 || answer.length > ResponseParser.longest { return .answer(head, isTorn: false) }
        } else if code == CURLE_OK {
            return .failure(.protocolError, message: "a response without a status", wasSent: wasSent)
        }
        let kind = PushFailure.Kind(code, wasSent: wasSent)
        return .failure(kind, message: message(code), wasSent: wasSent && !kind.isOfConnecting)
    }

    private func setConnection(_ sockets: OpenSockets, _ identity: PushIdentity, _ options: PushClientOptions) {
        unsafe ck_set_text(easy, CURLOPT_PROTOCOLS_STR, "https")
        unsafe ck_set_long(easy, CURLOPT_HTTP_VERSION, Int(CURL_HTTP_VERSION_2TLS))
        unsafe ck_set_long(easy, CURLOPT_SSLVERSION, Int(CURL_SSLVERSION_TLSv1_2))
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYPEER, 1)
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYHOST, 2)
        if let file = options.authorityFile {
            unsafe ck_set_text(easy, CURLOPT_CAINFO, file)
            // Otherwise libcurl would trust the system's directory as well.
            unsafe ck_set_text(easy, CURLOPT_CAPATH, nil)
        }
        if let chain = identity.certificateChainPEM, let key = keyPEM {
            unsafe ck_set_text(easy, CURLOPT_SSLCERTTYPE, "PEM")
            unsafe ck_set_text(easy, CURLOPT_SSLKEYTYPE, "PEM")
            unsafe chain.withUnsafeBytes {
                _ = unsafe ck_set_blob(easy, CURLOPT_SSLCERT_BLOB, $0.baseAddress, $0.count)
            }
            unsafe key.withBytes {
                _ = unsafe ck_set_lasting_blob(easy, CURLOPT_SSLKEY_BLOB, $0.baseAddress, $0.count)
            }
        }
        unsafe ck_set_long(easy, CURLOPT_NOSIGNAL, 1)
        // Does not wait for the thread that resolves a name: a broken DNS would delay the shutdown.
        unsafe ck_set_long(easy, CURLOPT_QUICK_EXIT, 1)
        unsafe ck_set_long(easy, CURLOPT_PIPEWAIT, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_NODELAY, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPALIVE, 1)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPIDLE, 60)
        unsafe ck_set_long(easy, CURLOPT_TCP_KEEPINTVL, 20)
        unsafe ck_set_long(easy, CURLOPT_CONNECTTIMEOUT_MS, Int(options.connectTimeout.wholeMilliseconds))
        unsafe ck_set_long(easy, CURLOPT_MAXAGE_CONN, max(1, Int(options.idleTimeout.components.seconds)))
        unsafe ck_set_pointer(easy, CURLOPT_SOCKOPTDATA, sockets.address)
        unsafe ck_set_pointer(easy, CURLOPT_CLOSESOCKETDATA, sockets.address)
        unsafe ck_set_socket_opened(easy, OpenSockets.opened)
        unsafe ck_set_socket_closes(easy, OpenSockets.closes)
    }

    private func setExchange() {
        let this = unsafe Unmanaged.passUnretained(self).toOpaque()
        unsafe ck_set_pointer(easy, CURLOPT_PRIVATE, this)
        unsafe ck_set_pointer(easy, CURLOPT_ERRORBUFFER, complaint)
        unsafe ck_set_long(easy, CURLOPT_POST, 1)
        // A response may arrive before the request is sent completely: the connection must stay open for the other requests.
        unsafe ck_set_long(easy, CURLOPT_KEEP_SENDING_ON_ERROR, 1)
        // The smallest sizes that libcurl allows: a payload has at most 5 KiB, a response some hundred bytes.
        unsafe ck_set_long(easy, CURLOPT_UPLOAD_BUFFERSIZE, 16384)
        unsafe ck_set_long(easy, CURLOPT_BUFFERSIZE, 4096)
        unsafe ck_set_pointer(easy, CURLOPT_HEADERDATA, this)
        unsafe ck_set_pointer(easy, CURLOPT_WRITEDATA, this)
        unsafe ck_set_pointer(easy, CURLOPT_PREREQDATA, this)
        unsafe ck_set_receiver(
            easy, CURLOPT_HEADERFUNCTION,
            { bytes, _, count, this in
                guard let transfer = unsafe Transfer.at(this) else { return 0 }
                unsafe transfer.answer.take(line: Transfer.buffer(bytes, count).span)
                transfer.watcher.heard(transfer)
                return count
            })
        unsafe ck_set_receiver(
            easy, CURLOPT_WRITEFUNCTION,
            { bytes, _, count, this in
                guard let transfer = unsafe Transfer.at(this) else { return 0 }
                return unsafe transfer.answer.take(piece: Transfer.buffer(bytes, count).span) ? count : 0
            })
        unsafe ck_set_before_sending(easy) { this, peer, _, peerPort, localPort in
            guard let transfer = unsafe Transfer.at(this) else { return CURL_PREREQFUNC_ABORT }
            let name = ConnectionTable.Name(
                localPort: UInt16(truncatingIfNeeded: localPort), peerPort: UInt16(truncatingIfNeeded: peerPort),
                peer: unsafe Transfer.digest(peer))
            return transfer.watcher.mayGo(transfer, on: name) ? CURL_PREREQFUNC_OK : CURL_PREREQFUNC_ABORT
        }
    }

    private func setTrace() {
        guard let trace else { return }
        unsafe ck_set_pointer(easy, CURLOPT_DEBUGDATA, Unmanaged.passUnretained(trace).toOpaque())
        unsafe ck_set_trace(easy, TraceSink.callback)
        unsafe ck_set_long(easy, CURLOPT_VERBOSE, 1)
    }

    /// Whether the assigned connection has negotiated HTTP/2.
    var hasAgreedOnHTTP2: Bool { unsafe ck_has_agreed_on_h2(easy) != 0 }

    private static func at(_ address: UnsafeMutableRawPointer?) -> Transfer? {
        guard let address = unsafe address else { return nil }
        return unsafe Unmanaged<Transfer>.fromOpaque(address).takeUnretainedValue()
    }

    private static func buffer(_ bytes: UnsafeMutablePointer<CChar>?, _ count: Int) -> UnsafeBufferPointer<UInt8> {
        unsafe UnsafeRawBufferPointer(start: bytes, count: count).assumingMemoryBound(to: UInt8.self)
    }

    /// FNV-1a of an address in text: tells servers with the same name apart.
    private static func digest(_ text: UnsafeMutablePointer<CChar>?) -> UInt64 {
        guard var place = unsafe text else { return 0 }
        var digest: UInt64 = 0xcbf2_9ce4_8422_2325
        while unsafe place.pointee != 0 {
            digest = unsafe (digest ^ UInt64(UInt8(bitPattern: place.pointee))) &* 0x100_0000_01b3
            unsafe place += 1
        }
        return digest
    }
}
