internal import TokenLedger
internal import TokenModel

/// The locks of other sessions that keep requests in the outbox.
struct SendLocks {
    private var watch: LockWatch

    init(_ timing: Timing) { watch = LockWatch(timing) }

    /// Sessions to be reported. Nil if there are none: locked requests are skipped silently, so only a session that is seen counts.
    var reported: [LockHolder]? { watch.reported.flatMap { $0.isEmpty ? nil : $0 } }

    /// Whether locks are being met now.
    var isMeeting: Bool { watch.isMeeting }

    /// Takes what a turn has met, and looks up who holds locks once they have been met for some time.
    ///
    /// - Parameter progress: What the pipeline has met since the last call.
    mutating func note(_ progress: SendPipeline.Progress, on connection: inout Connection) throws(DatabaseError) {
        watch.note(waits: progress.lockWaits, settled: progress.moved, now: .now)
        if watch.wantsLook(now: .now) { watch.saw(try LockHolder.all(inTheWayOf: .send, on: &connection), now: .now) }
    }
}
