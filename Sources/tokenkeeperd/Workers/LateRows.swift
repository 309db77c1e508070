internal import Logging
internal import TokenLedger
internal import TokenModel

/// Warns in the log when rows of a queue have been waiting for long, and says when that is over.
struct LateRows {
    /// The word for the rows, in the log.
    private let rows: String
    private let row: String
    /// Since when rows have been late, and whether the log says so.
    private var late: (since: ContinuousClock.Instant, isLogged: Bool)?

    /// Older rows are worth a warning, here and in the view `status`.
    private static let lateAfter: Duration = .seconds(300)
    /// By then, the cause is known.
    private static let logsAfter: Duration = .seconds(8)

    init(_ queue: QueueName) {
        (row, rows) = queue == .results ? ("result", "results") : ("registration", "registrations")
    }

    mutating func warn(_ report: Heartbeat.QueueReport, _ logger: Logger) {
        let queue = report.queue
        guard let oldest = queue.oldest, oldest.advanced(byMicroseconds: Self.lateAfter.microseconds) < .now else {
            if late?.isLogged == true {
                logger.notice(
                    "no \(row) has been waiting for longer than five minutes any more",
                    metadata: ["\(rows)": "\(queue.depth)"])
            }
            late = nil
            return
        }
        let since = late?.since ?? .now
        guard late?.isLogged != true, since.duration(to: .now) >= Self.logsAfter else {
            late = (since, late?.isLogged ?? false)
            return
        }
        late = (since, true)
        logger.warning(
            "\(rows) have been waiting for longer than five minutes",
            metadata: [
                "\(rows)": "\(queue.depth)", "oldest": "\(ServiceState.text(oldest.date))",
                "because": "\(report.reason ?? "")",
            ])
    }
}
