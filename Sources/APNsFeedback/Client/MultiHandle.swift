internal import CCurl

/// libcurl's multi handle: opens the connections of a thread's clients, and waits for all of them.
///
/// Sendable although it holds a pointer: only the thread that runs the clients calls anything except `wake`, and libcurl's manual
/// allows `curl_multi_wakeup` from any thread. The reference keeps the handle alive until the last call returns.
@safe final class MultiHandle: @unchecked Sendable {
    private let handle: UnsafeMutableRawPointer
    /// The connections that are not open yet, and their servers.
    private var underway: [ObjectIdentifier: PushServer] = [:]

    /// How many connections to one server may be in the making. libcurl starts a thread for each name that it resolves.
    private static let mostUnderway = 12

    /// libcurl's initialization, which happens once per process.
    private static let isReady: Bool = ck_global_init() == CURLE_OK

    init() {
        guard Self.isReady, let handle = unsafe curl_multi_init() else { fatalError("libcurl cannot be initialized") }
        unsafe self.handle = handle
    }

    /// Remove all connections first.
    deinit {
        unsafe curl_multi_cleanup(handle)
    }

    /// Ends the current wait, or the next one if there is none. May be called from any thread.
    func wake() {
        unsafe curl_multi_wakeup(handle)
    }

    /// Whether another connection to a server may be added now.
    func hasRoom(for server: PushServer) -> Bool {
        underway.isEmpty || underway.values.count { $0 == server } < Self.mostUnderway
    }

    /// Begins to connect.
    ///
    /// - Returns: Nil, or libcurl's error message.
    func add(_ connection: TLSConnection) -> String? {
        let code = unsafe curl_multi_add_handle(handle, connection.easy)
        if code != CURLM_OK { return unsafe String(cString: curl_multi_strerror(code)) }
        underway[ObjectIdentifier(connection)] = connection.server
        return nil
    }

    /// Closes a connection, or stops connecting.
    func remove(_ connection: TLSConnection) {
        underway[ObjectIdentifier(connection)] = nil
        unsafe curl_multi_remove_handle(handle, connection.easy)
    }

    /// Continues to connect, without waiting. Call it before each wait: expired timers would end the wait at once.
    ///
    /// - Returns: The connections that have opened or failed.
    func connect() -> [(connection: TLSConnection, code: CURLcode)] {
        var (running, left): (Int32, Int32) = (0, 0)
        unsafe curl_multi_perform(handle, &running)
        var ended: [(TLSConnection, CURLcode)] = []
        while let message = unsafe curl_multi_info_read(handle, &left) {
            guard unsafe message.pointee.msg == CURLMSG_DONE, let easy = unsafe message.pointee.easy_handle,
                let connection = unsafe TLSConnection.of(easy)
            else { continue }
            underway[ObjectIdentifier(connection)] = nil
            unsafe ended.append((connection, message.pointee.data.result))
        }
        return ended
    }

    /// Waits until a socket is ready, a connection makes progress, `wake` is called, or the time has passed.
    func wait(for sockets: inout [curl_waitfd], milliseconds: Int32) {
        unsafe sockets.withUnsafeMutableBufferPointer { sockets in
            _ = unsafe curl_multi_poll(handle, sockets.baseAddress, UInt32(sockets.count), milliseconds, nil)
        }
    }
}
