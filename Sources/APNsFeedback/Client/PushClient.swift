public import TokenModel

/// Start here: sends notifications to APNs, over a few HTTP/2 connections.
///
/// A client has one identity and serves both environments. Give its `PushThread` a thread, and call everything else from any thread. `collect` returns the outcome of each request once, in the order in which the requests ended.
///
/// A request is sent at most twice when connections or streams are lost, and once more if APNs refuses the provider token as
/// expired or as unrelated to the connection; always with the same `apns-id`. What a server says that it did not process does not
/// count. When a server cannot be reached, the client pauses, and requests for that server end at once.
///
/// The parts: `PushMailbox` is shared with other threads. `ConnectionPool`, with a `ConnectionState` for each connection, decides what
/// happens, and a `Delivery` whether its request is sent again. `PushWork` performs it over a `Link` for each connection: an
/// `HTTP2Session` (libnghttp2) over a `TLSConnection` (libcurl). `PushLoop` gives each client of a thread its turns.
public final class PushClient: Sendable {
    let mailbox = PushMailbox()
    let identity: @Sendable () throws -> PushIdentity
    let options: PushClientOptions
    let ended: @Sendable () -> Void
    private let thread: PushThread

    /// - Parameter ended: Called on the client's thread when there are outcomes to collect, once for all requests that ended
    ///   together. `withdraw` calls it too, and `submit` after the stop.
    public convenience init(
        _ identity: PushIdentity, _ options: PushClientOptions, ended: @escaping @Sendable () -> Void
    ) {
        self.init(options, identity: { identity }, ended: ended)
    }

    /// - Parameters:
    ///   - thread: Many clients may share one. The time limits of all should be equal.
    ///   - identity: Called before each connection and each request. It may change: see `reconnect`. An error ends a request unsent.
    public init(
        _ options: PushClientOptions, on thread: PushThread = PushThread(),
        identity: @escaping @Sendable () throws -> PushIdentity, ended: @escaping @Sendable () -> Void
    ) {
        self.thread = thread
        self.identity = identity
        self.options = options
        self.ended = ended
    }

    /// Adds requests to the queue. The queue has no limit: see `state`.
    public func submit(_ requests: [PushRequest]) {
        if mailbox.put(requests) { thread.wake() } else { ended() }
    }

    /// Takes requests back. Those of which no server can have the whole end as withdrawn; the others are not repeated, and end with
    /// their response.
    ///
    /// - Parameters:
    ///   - slots: Of requests that were submitted before this call. Others are ignored.
    ///   - isIfUnsent: Whether those that were sent go on, and may be repeated.
    public func withdraw(_ slots: Set<Int>, ifUnsent isIfUnsent: Bool = false) {
        if mailbox.withdraw(slots, ifUnsent: isIfUnsent) { ended() }
        thread.wake()
    }

    /// Leaves the connections to a server, once their requests have ended. The next requests go over new connections.
    public func reconnect(_ environment: Environment) {
        mailbox.reconnect(environment)
        thread.wake()
    }

    /// The requests that have ended since the last call.
    public func collect() -> [PushOutcome] { mailbox.takeOutcomes() }

    /// Sends nothing new. Unsent requests end as withdrawn at once; requests in flight may still get their response.
    ///
    /// - Parameter patience: How long to wait for responses. Requests without one then end as unanswered.
    public func stop(patience: Duration) {
        mailbox.stop(by: .now + patience)
        thread.wake()
    }

    /// Does the work until the client has stopped: for a client with a thread of its own. Call it once.
    public func run() { thread.run([self]) }

    /// As of the last turn of the thread.
    public var state: PushClientState { mailbox.state }
}
