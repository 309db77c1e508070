internal import TokenLedger
internal import TokenModel

/// Keeps this daemon's row in `sending_daemon` fresh, and takes over the requests of daemons that have ended. One per connection to
/// the database.
struct SendPresence {
    /// A JSON array that describes the credentials: see `LoadedCredential`.
    let credentials: String
    private let connectedAt = ContinuousClock.now
    private var beatAt: ContinuousClock.Instant?
    private var tookOverAt: ContinuousClock.Instant?

    static let beatEvery: Duration = .seconds(5)
    private static let takeOverEvery: Duration = .seconds(10)

    /// After an outage of the database, other daemons may reconnect later than this one. Until then, silence proves nothing.
    private static let trustsSilenceAfter: Duration = .seconds(30)

    init(credentials: String) {
        self.credentials = credentials
    }

    /// Does what is due.
    mutating func keep(
        _ pipeline: inout SendPipeline, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        if isDue(beatAt, every: Self.beatEvery) {
            // This process may have been suspended, and another daemon may have taken over its requests.
            if let beatAt, beatAt.duration(to: .now) > Outbox.silence / 2 {
                try pipeline.reconcile(outbox, on: &connection)
            }
            beatAt = .now
            pipeline.summary.report(waiting: pipeline.blockedTopics)
            try outbox.beat(credentials: credentials, trouble: pipeline.problems, on: &connection)
        }
        if isDue(tookOverAt, every: Self.takeOverEvery) {
            tookOverAt = .now
            pipeline.summary.tookOver(
                try outbox.takeOver(
                    silentToo: connectedAt.duration(to: .now) > Self.trustsSilenceAfter, on: &connection,
                    isAlive: ProcessScope.isAlive))
        }
    }

    private func isDue(_ last: ContinuousClock.Instant?, every interval: Duration) -> Bool {
        last.map { $0.duration(to: .now) >= interval } ?? true
    }
}
