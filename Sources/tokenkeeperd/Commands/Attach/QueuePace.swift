internal import TokenLedger
internal import TokenModel

/// Keeps a backfill or an import from outrunning the drain: what an application queues waits behind it.
struct QueuePace {
    /// It waits while more registrations than this are queued. A daemon applies them within seconds.
    static let most = 50_000
    /// The queue is looked at once per this many rows.
    private static let lookEvery: Int64 = 10_000
    private static let pause: Duration = .milliseconds(250)
    /// After so long, standard error says why nothing happens.
    private static let patience: Duration = .seconds(15)

    let stop: ShutdownRequest
    private let bell = Wakeup()
    private var sinceLook: Int64 = QueuePace.lookEvery
    private var hasComplained = false

    init(stop: ShutdownRequest) {
        self.stop = stop
        stop.alsoRing(bell)
    }

    /// Waits until the queue is short enough, or a shutdown is requested.
    ///
    /// - Parameter rows: How many were queued since the last call.
    mutating func wait(after rows: Int64, _ bar: inout ProgressBar, on connection: inout Connection)
        throws(DatabaseError)
    {
        sinceLook += rows
        if sinceLook < Self.lookEvery { return }
        sinceLook = 0
        let began = ContinuousClock.now
        while !stop.isAsked, try Backfill.queued(atMost: Self.most + 1, on: &connection) > Self.most {
            bar.wait(because: "waits for the queue")
            if !hasComplained, began.duration(to: .now) > Self.patience {
                hasComplained = true
                bar.clear()
                ConfigurationOptions.complain(
                    "waiting: more than \(Self.most) registrations are queued. Is a daemon running? See `tokenkeeperd status`"
                )
            }
            bell.wait(for: Self.pause)
        }
    }

    /// Waits for a moment, before something is tried again.
    func rest(for pause: Duration) { bell.wait(for: pause) }
}
