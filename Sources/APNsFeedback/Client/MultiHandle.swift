internal import CCurl

/// libcurl's multi handle: all connections of a client, and the requests that share them.
///
/// Sendable although it holds a pointer: only the thread that runs the client calls anything except `wake`, and libcurl's manual
/// allows `curl_multi_wakeup` from any thread. The reference keeps the handle alive until the last call returns.
@safe final class MultiHandle: @unchecked Sendable {
    private let handle: UnsafeMutableRawPointer
    let sockets = OpenSockets()

    /// libcurl's initialization, which happens once per process.
    private static let isReady: Bool = ck_global_init() == CURLE_OK

    init(connections: Int) {
        guard Self.isReady, let handle = unsafe curl_multi_init() else { fatalError("libcurl cannot be initialized") }
        unsafe self.handle = handle
        unsafe ck_multi_set_long(handle, CURLMOPT_PIPELINING, Int(CURLPIPE_MULTIPLEX))
        unsafe ck_multi_set_long(handle, CURLMOPT_MAX_HOST_CONNECTIONS, connections)
        // Idle connections are kept as well.
        unsafe ck_multi_set_long(handle, CURLMOPT_MAXCONNECTS, connections * 2)
        unsafe ck_multi_set_long(handle, CURLMOPT_MAX_CONCURRENT_STREAMS, 1000)
    }

    /// Remove all transfers first.
    deinit {
        unsafe curl_multi_cleanup(handle)
    }

    /// Ends the current wait, or else the next one. Call it from any thread.
    func wake() {
        unsafe curl_multi_wakeup(handle)
    }

    /// - Returns: Nil, or libcurl's error message.
    func add(_ transfer: Transfer) -> String? {
        let code = unsafe curl_multi_add_handle(handle, transfer.easy)
        return code == CURLM_OK ? nil : unsafe String(cString: curl_multi_strerror(code))
    }

    func remove(_ transfer: Transfer) {
        unsafe curl_multi_remove_handle(handle, transfer.easy)
    }

    /// Reads and writes whatever is possible without waiting. The data goes out at the end, in full packets: libcurl writes each
    /// frame by itself, three per request.
    func perform() {
        var running: Int32 = 0
        sockets.holdBack(true)
        unsafe curl_multi_perform(handle, &running)
        sockets.holdBack(false)
    }

    /// The next transfer that has ended, and how. The caller removes it.
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

    /// Waits until there is something to do, or the time has passed.
    func wait(milliseconds: Int32) {
        var ready: Int32 = 0
        unsafe curl_multi_poll(handle, nil, 0, milliseconds, &ready)
    }
}
