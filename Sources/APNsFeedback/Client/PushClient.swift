public import TokenModel

/// Start here: sends notifications to APNs from one thread, over a few HTTP/2 connections.
///
/// A client has one identity and serves both environments. Give it a thread for `run`, and call everything else from any
/// thread. `collect` returns the outcome of each request once, in the order in which the requests ended.
///
/// A request is sent at most twice when connections or streams are lost, and once more if APNs refuses the provider token as
/// expired or as unrelated to the connection; always with the same `apns-id`. What a server says that it did not process does not
/// count. When a server cannot be reached, the client pauses, and requests for that server end at once.
///
/// The parts: `PushMailbox` is shared with other threads. `ConnectionPool`, with a `ConnectionState` for each connection, decides what
/// happens, and a `Delivery` whether its request is sent again. `PushLoop` is the thread's loop and performs it over a `Link` for
/// each connection: an `HTTP2Session` (libnghttp2) over a `TLSConnection` (libcurl).
public final class PushClient: Sendable {
    private let mailbox = PushMailbox()
    private let multi = MultiHandle()
    private let identity: @Sendable () throws -> PushIdentity
    private let options: PushClientOptions
    private let ended: @Sendable () -> Void

    /// - Parameter ended: Called on the thread of `run` when there are outcomes to collect, once for all requests that ended
    ///   together. `withdraw` calls it too, and `submit` after the stop.
    public convenience init(
        _ identity: PushIdentity, _ options: PushClientOptions, ended: @escaping @Sendable () -> Void
    ) {
        self.init(options, identity: { identity }, ended: ended)
    }

    /// - Parameter identity: Called before each connection and each request. It may change: see `reconnect`. An error ends a request unsent.
    public init(
        _ options: PushClientOptions, identity: @escaping @Sendable () throws -> PushIdentity,
        ended: @escaping @Sendable () -> Void
    ) {
        self.identity = identity
        self.options = options
        self.ended = ended
    }

    /// Adds requests to the queue. The queue has no limit: see `state`.
    public func submit(_ requests: [PushRequest]) {
        if mailbox.put(requests) { multi.wake() } else { ended() }
    }

    /// Takes requests back. Those of which no server can have the whole end as withdrawn; the others are not repeated, and end with
    /// their response.
    ///
    /// - Parameter slots: Of requests that were submitted before this call. Others are ignored.
    public func withdraw(_ slots: Set<Int>) {
        if mailbox.withdraw(slots) { ended() }
        multi.wake()
    }

    /// Leaves the connections to a server, once their requests have ended. The next requests go over new connections.
    public func reconnect(_ environment: Environment) {
        mailbox.reconnect(environment)
        multi.wake()
    }

    /// The requests that have ended since the last call.
    public func collect() -> [PushOutcome] { mailbox.takeOutcomes() }

    /// Sends nothing new. Unsent requests end as withdrawn at once; requests in flight may still get their response.
    ///
    /// - Parameter patience: How long to wait for responses. Requests without one then end as unanswered.
    public func stop(patience: Duration) {
        mailbox.stop(by: .now + patience)
        multi.wake()
    }

    /// Does the work until the client has stopped. Call it once.
    public func run() {
        PushLoop(mailbox, multi, identity, options, ended: ended).run()
        mailbox.close()
        ended()
    }

    /// As of the last turn of the thread.
    public var state: PushClientState { mailbox.state }
}
