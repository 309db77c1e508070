public import TokenModel

/// Sends notifications to APNs, over few HTTP/2 connections, from one thread.
///
/// One client has one identity, and serves both environments. Give it a thread for `run`; everything else may be called from
/// any thread. What each request came to is to be had from `collect`, once, in the order of their ends.
///
/// A request is sent at most twice when connections or streams get lost, and once more where APNs refuses the provider token
/// as expired or as unrelated to the connection; always with the same `apns-id`. A server that cannot be reached is left in
/// peace for a while, in which its requests end at once.
public final class PushClient: Sendable {
    private let mailbox = PushMailbox()
    private let multi: MultiHandle
    private let identity: PushIdentity
    private let options: PushClientOptions
    private let ended: @Sendable () -> Void

    /// - Parameter ended: Called when there are outcomes to collect, from the thread of `run`: once for all that ended
    ///   together. After the stop also from `submit`.
    public init(_ identity: PushIdentity, _ options: PushClientOptions, ended: @escaping @Sendable () -> Void) {
        self.identity = identity
        self.options = options
        self.ended = ended
        multi = MultiHandle(connections: max(1, options.connections))
    }

    /// Adds requests to the queue, which has no limit: see `state`.
    public func submit(_ requests: [PushRequest]) {
        if mailbox.put(requests) { multi.wake() } else { ended() }
    }

    /// What has ended since the last call.
    public func collect() -> [PushOutcome] { mailbox.takeOutcomes() }

    /// Begins nothing new: what has not been sent ends as withdrawn at once, what has been is waited for.
    ///
    /// - Parameter patience: How long at most; then it ends as unanswered.
    public func stop(patience: Duration) {
        mailbox.stop(by: .now + patience)
        multi.wake()
    }

    /// Does the work, until a stop is over. To be called once.
    public func run() {
        PushLoop(mailbox, multi, identity, options, ended: ended).run()
        mailbox.close()
        ended()
    }

    /// As of the last turn of the thread.
    public var state: PushClientState { mailbox.state }
}
