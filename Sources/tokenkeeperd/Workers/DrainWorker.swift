internal import Logging
internal import TokenLedger
internal import TokenModel

/// Drains both queues: at short intervals while there is work, at longer ones while there is none.
struct DrainWorker {
    let worker: Worker
    let daemonID: String
    let bell: Wakeup
    let summary: DrainSummary
    let backlog: BacklogWorker.Backlog
    /// Nil if there are no metrics.
    let topicLabels: TopicLabels?

    func run() {
        var problemAt: ContinuousClock.Instant?
        worker.run(bell: bell) { connection, schema, succeeded in
            var drain = Drain(worker.configuration, pair: backlog.pair, summary: summary)
            var reporting = try DrainReporting(worker, daemonID: daemonID, summary, on: &connection)
            defer { summary.report() }
            // The monitor worker repeats this. A counter should not begin under another label.
            var ignored: DatabaseError?
            try connection.attempt(noting: &ignored) { connection throws(DatabaseError) in
                try topicLabels?.refresh(on: &connection)
            }
            var pause = worker.configuration.pollBusy
            while !worker.stop.isAsked {
                let configuration = worker.configuration
                drain.follow(configuration)
                reporting.passBegins(configuration)
                let pass = try makePass(of: &drain, schema, on: &connection) {
                    connection, soFar, unread throws(DatabaseError) in
                    backlog.report(soFar, pagesLeft: unread.total)
                    try reporting.batchEnded(soFar, unread, on: &connection)
                    // A pass over a backlog takes long: the first batch already shows that the database is back.
                    if problemAt == nil, soFar.trouble == nil, !reporting.isHeldUp, soFar.moved { succeeded() }
                    return !worker.stop.isAsked
                }
                try reporting.passEnded(pass, on: &connection)
                if let trouble = pass.trouble {
                    problemAt = .now
                    worker.outages.lost(trouble, worker.part)
                } else if !reporting.isHeldUp,
                    problemAt.map({ $0.duration(to: .now) > worker.timing.problemLasts }) ?? true
                {
                    problemAt = nil
                    succeeded()
                }
                summary.add(pass)
                pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
                if reporting.isMeetingLocks { pause = min(pause, worker.timing.lockPatience) }
                worker.rest(bell, for: pause)
            }
            try reporting.signOff(on: &connection)
        }
    }

    /// Makes a pass.
    ///
    /// - Returns: What it has done, and as `trouble` what a person must fix. A missing function that is none of ours is such a thing: it ends
    ///   the pass, but not the connection, which would be made again and again.
    private func makePass(
        of drain: inout Drain, _ schema: CheckedSchema, on connection: inout Connection,
        betweenBatches goesOn: Drain.GoesOn
    ) throws(DatabaseError) -> Drain.Pass {
        var soFar = Drain.Pass()
        do {
            return try drain.pass(on: &connection, report: summary.note) {
                connection, done, unread throws(DatabaseError) in
                soFar = done
                return try goesOn(&connection, done, unread)
            }
        } catch {
            guard schema.isMissingFunction(error, on: &connection) else {
                summary.add(soFar)
                throw error
            }
            soFar.ended(by: error)
            return soFar
        }
    }
}
