/// Told on the client's thread which requests may have been sent. A sender that writes this down outside its own memory knows after a
/// crash which requests no server can have. The calls must not wait.
public protocol SendObserver: Sendable {
    /// The end of a request is in the bytes that TLS gets next. Called again when the request is sent again.
    ///
    /// - Parameter slot: `PushRequest.slot`.
    func maySend(_ slot: Int)

    /// No server has processed the request: its connection ended before TLS took the end of the request, or the server says so.
    func didNotSend(_ slot: Int)
}
