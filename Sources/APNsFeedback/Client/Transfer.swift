internal import CCurl
internal import Glibc
internal import TokenModel

/// What a client's loop is asked and told while libcurl is at work; on its thread, from within libcurl.
protocol TransferWatcher: AnyObject {
    /// Whether the request may go to this connection now.
    func mayGo(_ transfer: Transfer, on name: ConnectionTable.Name) -> Bool
    /// Something of the answer came in.
    func heard(_ transfer: Transfer)
}

/// A handle of libcurl for one request at a time, with the memory that libcurl reads it from and the answer that it writes.
///
/// Belongs to one thread. libcurl keeps pointers to the lines, the payload, the key and this object: they are freed after the
/// handle.
@safe final class Transfer {
    let easy: UnsafeMutableRawPointer
    unowned let watcher: any TransferWatcher

    /// The request that is under way; nil when there is none.
    var delivery: Delivery?
    var answer = ResponseParser()
    /// The connection that it went to in this turn.
    var connection: ConnectionTable.Name?
    /// Why it was not allowed to go to the connection that libcurl had for it.
    var obstacle: Obstacle?
    /// When it was handed to libcurl, and when it went to the connection.
    var handedAt = ContinuousClock.now
    var wentAt: ContinuousClock.Instant?

    enum Obstacle {
        /// The connection has one and has not yet answered, or is to be closed.
        case notYet
        /// The connection does not speak HTTP/2.
        case notHTTP2
        /// It went often enough.
        case often
    }

    private var lines: UnsafeMutablePointer<CChar>
    private var linesCapacity = 1024
    private let headers = UnsafeMutablePointer<curl_slist>.allocate(capacity: RequestText.mostHeaders)
    private var payload: UnsafeMutablePointer<UInt8>
    private var payloadCapacity = 512
    private let complaint = UnsafeMutablePointer<CChar>.allocate(capacity: Int(CURL_ERROR_SIZE))
    private let trace: TraceSink?
    /// libcurl reads the key from here for each connection: a copy of its own would not be wiped.
    private let keyPEM: SecretBytes?

    /// - Returns: Nil when libcurl has no memory.
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
    }

    deinit {
        unsafe curl_easy_cleanup(easy)
        unsafe lines.deallocate()
        unsafe payload.deallocate()
        unsafe headers.deallocate()
        unsafe complaint.deallocate()
    }

    /// What libcurl knows it by, for finding it again.
    static func of(_ easy: UnsafeMutableRawPointer) -> Transfer? {
        var found: UnsafeMutableRawPointer?
        guard unsafe ck_get_pointer(easy, CURLINFO_PRIVATE, &found) == CURLE_OK, let found = unsafe found else {
            return nil
        }
        return unsafe Unmanaged<Transfer>.fromOpaque(found).takeUnretainedValue()
    }

    /// Writes the request where libcurl finds it.
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
        // libcurl copies the URL only.
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

    /// What libcurl says about a failure, in one line.
    func message(_ code: CURLcode) -> String {
        let text = unsafe complaint[0] == 0 ? String(cString: curl_easy_strerror(code)) : String(cString: complaint)
        return text.split(whereSeparator: \.isNewline).joined(separator: "; ")
    }

    private func setConnection(_ sockets: OpenSockets, _ identity: PushIdentity, _ options: PushClientOptions) {
        unsafe ck_set_text(easy, CURLOPT_PROTOCOLS_STR, "https")
        unsafe ck_set_long(easy, CURLOPT_HTTP_VERSION, Int(CURL_HTTP_VERSION_2TLS))
        unsafe ck_set_long(easy, CURLOPT_SSLVERSION, Int(CURL_SSLVERSION_TLSv1_2))
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYPEER, 1)
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYHOST, 2)
        if let file = options.authorityFile {
            unsafe ck_set_text(easy, CURLOPT_CAINFO, file)
            // The system's directory would be trusted as well.
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
        // A thread that still asks for a name is not waited for: a broken DNS would hold up everything else.
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
        // An answer may come before the request has been read; it is no reason to close what others use.
        unsafe ck_set_long(easy, CURLOPT_KEEP_SENDING_ON_ERROR, 1)
        // The least that libcurl allows: a payload has at most 5 KiB, an answer some hundred bytes.
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
        if let trace {
            unsafe ck_set_pointer(easy, CURLOPT_DEBUGDATA, Unmanaged.passUnretained(trace).toOpaque())
            unsafe ck_set_trace(easy, TraceSink.callback)
            unsafe ck_set_long(easy, CURLOPT_VERBOSE, 1)
        }
    }

    /// Whether the connection that it is about to go to has agreed on HTTP/2.
    var hasAgreedOnHTTP2: Bool { unsafe ck_has_agreed_on_h2(easy) != 0 }

    private static func at(_ address: UnsafeMutableRawPointer?) -> Transfer? {
        guard let address = unsafe address else { return nil }
        return unsafe Unmanaged<Transfer>.fromOpaque(address).takeUnretainedValue()
    }

    private static func buffer(_ bytes: UnsafeMutablePointer<CChar>?, _ count: Int) -> UnsafeBufferPointer<UInt8> {
        unsafe UnsafeRawBufferPointer(start: bytes, count: count).assumingMemoryBound(to: UInt8.self)
    }

    /// FNV-1a of an address in text: two servers that answer to one name have different ones.
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
