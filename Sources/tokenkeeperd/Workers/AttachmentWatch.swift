internal import Logging
internal import TokenLedger

/// Looks at the attached tables once a minute, and logs what has changed. The view `status` shows the rest.
struct AttachmentWatch {
    /// How often to look: `Timing.attachments`.
    let pause: Duration
    private var again = ContinuousClock.now

    init(every pause: Duration) { self.pause = pause }

    /// Takes at most one hundredth of the time.
    mutating func look(on connection: inout Connection, _ logger: Logger) throws(DatabaseError) {
        let began = ContinuousClock.now
        if began < again { return }
        for change in try AttachmentChange.noticeNew(on: &connection) { Self.log(change, logger) }
        again = .now + max(pause, began.duration(to: .now) * 100)
    }

    private static func log(_ change: AttachmentChange, _ logger: Logger) {
        if let fault = change.fault, fault != change.was {
            logger.warning(
                "the changes of an attached table do not arrive",
                metadata: ["table": "\(change.table)", "fault": "\(fault)"])
        } else if change.fault == nil, let was = change.was {
            logger.notice(
                "the changes of an attached table arrive again; `tokenkeeperd backfill` queues the registrations that were missed",
                metadata: ["table": "\(change.table)", "was": "\(was)"])
        }
        if change.failures > 0 {
            logger.warning(
                "changes of an attached table could not be queued",
                metadata: [
                    "table": "\(change.table)", "changes": "\(change.failures)", "error": "\(change.failure ?? "")",
                ])
        }
    }
}
