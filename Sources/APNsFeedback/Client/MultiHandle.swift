internal import CCurl

/// libcurl's multi handle: all connections of a client, and the requests that share them.
///
/// Sendable although it holds a pointer: everything but `wake` is called by the one thread that runs the client, and
/// `curl_multi_wakeup` may be called from any (libcurl's manual). The reference keeps the handle until the last call is over.
@safe final class MultiHandle: @unchecked Sendable {
    private let handle: UnsafeMutableRawPointer
    let sockets = OpenSockets()

    /// Reads the certificates, and whatever else libcurl does once a process.
    private static let isReady: Bool = ck_global_init() == CURLE_OK

    init(connections: Int) {
        guard Self.isReady, let handle = unsafe curl_multi_init() else { fatalError("libcurl cannot be initialised") }
        unsafe self.handle = handle
        unsafe ck_multi_set_long(handle, CURLMOPT_PIPELINING, Int(CURLPIPE_MULTIPLEX))
        unsafe ck_multi_set_long(handle, CURLMOPT_MAX_HOST_CONNECTIONS, connections)
        // Without requests as many are kept.
        unsafe ck_multi_set_long(handle, CURLMOPT_MAXCONNECTS, connections * 2)
        unsafe ck_multi_set_long(handle, CURLMOPT_MAX_CONCURRENT_STREAMS, 1000)
    }

    /// All transfers must have been removed.
    deinit {
        unsafe curl_multi_cleanup(handle)
    }

    /// Ends the wait that is under way, or else the next one. Any thread.
    func wake() {
        unsafe curl_multi_wakeup(handle)
    }

    /// - Returns: Nil, or what libcurl objected to.
    func add(_ transfer: Transfer) -> String? {
        let code = unsafe curl_multi_add_handle(handle, transfer.easy)
        return code == CURLM_OK ? nil : unsafe String(cString: curl_multi_strerror(code))
    }

    func remove(_ transfer: Transfer) {
        unsafe curl_multi_remove_handle(handle, transfer.easy)
    }

    /// Reads and writes whatever is possible without waiting. What is written goes out when it is over, in full packets:
    /// libcurl writes each frame by itself, three a request.
    func perform() {
        var running: Int32 = 0
        sockets.holdBack(true)
        unsafe curl_multi_perform(handle, &running)
        sockets.holdBack(false)
    }

    /// The next transfer that has ended, and how; it is still to be removed.
    func nextEnded() -> (transfer: Transfer, code: CURLcode)? {
        var left: Int32 = 0
        while let message = unsafe curl_multi_info_read(handle, &left) {
            guard unsafe message.pointee.msg == CURLMSG_DONE, let easy = unsafe message.pointee.easy_handle,
                let transfer = unsafe Transfer.of(easy)
            else { continue }
            return unsafe (transfer, message.pointee.data.result)
        }
        return nil
    }

    /// Waits until there is something to do, or has been for so long.
    func wait(milliseconds: Int32) {
        var ready: Int32 = 0
        unsafe curl_multi_poll(handle, nil, 0, milliseconds, &ready)
    }
}
