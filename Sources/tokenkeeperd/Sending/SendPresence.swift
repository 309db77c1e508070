internal import TokenLedger
internal import TokenModel

/// Keeps this daemon's row in `sending_daemon` fresh, and takes over the requests of daemons that have ended. One per connection to
/// the database.
struct SendPresence {
    let refresh: CredentialRefresh
    /// Where the daemons of this machine mark what they have sent; nil if nowhere.
    let marks: SentMarkFiles?
    private var beatAt: ContinuousClock.Instant?
    private var sharedAt: ContinuousClock.Instant?
    private var lookedAt: ContinuousClock.Instant?
    private var readAt: ContinuousClock.Instant? = .now
    /// How many requests had ended, and when.
    private var counted: (requests: Int, at: ContinuousClock.Instant)?
    /// What keeps requests waiting, as it was last reported.
    private var problems: [String] = []
    private var tookOverAt: ContinuousClock.Instant?

    private let timing: Timing

    init(_ refresh: CredentialRefresh, marks: SentMarkFiles?, _ timing: Timing) {
        self.timing = timing
        self.refresh = refresh
        self.marks = marks
    }

    /// Does what is due.
    ///
    /// - Parameters:
    ///   - silences: Which other daemons are silent. It outlives the connection; looks that are far apart start over.
    ///   - locks: The sessions whose locks keep requests in the outbox, if there are any.
    ///   - report: Called with what keeps requests waiting, when that changes.
    ///   - chores: Called once a second with the chores that fail.
    mutating func keep(
        _ pipeline: inout SendPipeline, _ outbox: Outbox, _ silences: inout SilenceWatch, locks: [LockHolder]?,
        on connection: inout Connection, report: ([String]) -> Void,
        chores: ([Chores.Failure], inout Connection) -> Void
    ) throws(DatabaseError) {
        if isDue(lookedAt, every: timing.soon) {
            lookedAt = .now
            try look(&pipeline, outbox, locks: locks, on: &connection, report: report)
            chores(pipeline.chores.failures, &connection)
        }
        if isDue(beatAt, every: timing.heartbeat) {
            beatAt = .now
            let rate = rate(pipeline.state.counts.total)
            pipeline.databaseClock.note(
                try outbox.beat(
                    credentials: pipeline.credentials, trouble: problems, perSecond: rate, on: &connection), at: .now)
        }
        if isDue(sharedAt, every: timing.heartbeat) {
            sharedAt = .now
            try pipeline.shareTokens(outbox, on: &connection)
        }
        if isDue(tookOverAt, every: timing.takeOver) {
            tookOverAt = .now
            // A COMMIT that waits for a standby outlives its connection. When it ends, this daemon has claims that it does not know.
            // And after a suspension of this process, another daemon may have taken over its requests.
            try pipeline.reconcile(outbox, on: &connection)
            pipeline.summary.tookOver(
                try outbox.takeOver(
                    on: &connection, isSilent: { silences.note($0, $1) }, isAlive: ProcessScope.isAlive,
                    sent: { marks?.sent(by: $0) }))
            try removeMarks(outbox, on: &connection)
        }
    }

    /// How many requests have ended per second since the last call.
    private mutating func rate(_ requests: Int) -> Double {
        let now = ContinuousClock.now
        defer { counted = (requests, now) }
        return counted.map { Double(requests - $0.requests) / ($0.at.duration(to: now) / .seconds(1)) } ?? 0
    }

    /// Takes up what has changed, and says what keeps requests waiting.
    private mutating func look(
        _ pipeline: inout SendPipeline, _ outbox: Outbox, locks: [LockHolder]?, on connection: inout Connection,
        report: ([String]) -> Void
    ) throws(DatabaseError) {
        pipeline.reportFaults()
        if refresh.take() || isDue(readAt, every: timing.credentials) {
            readAt = .now
            if pipeline.refreshCredentials() { (beatAt, sharedAt) = (nil, nil) }
        }
        try pipeline.resume(outbox, on: &connection)
        let found = pipeline.problems + (locks.map { ["requests wait for a lock in PostgreSQL: \($0.words)"] } ?? [])
        if found != problems {
            // `status` should soon show it.
            beatAt = nil
            problems = found
            report(found)
        }
        pipeline.summary.report(waiting: pipeline.waiting)
    }

    /// Removes the marks of ended daemons that nobody needs any more.
    private func removeMarks(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        guard let marks else { return }
        let ended = marks.daemons.filter { $0 != outbox.daemonID && !ProcessScope.isAlive($0) }
        if ended.isEmpty { return }
        for daemonID in try outbox.finished(among: ended, on: &connection) { marks.remove(daemonID) }
    }

    private func isDue(_ last: ContinuousClock.Instant?, every interval: Duration) -> Bool {
        last.map { $0.duration(to: .now) >= interval } ?? true
    }
}
