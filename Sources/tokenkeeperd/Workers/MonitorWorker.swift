internal import TokenLedger
internal import TokenModel

/// Looks at the database for the metrics and the status page, so that no request does. It runs only if `metrics.listen` is set.
///
/// It has a connection of its own: that of the sweep is busy for as long as a sweep takes, and the drain must not wait for a look.
struct MonitorWorker {
    let worker: Worker
    let bell: Wakeup
    let labels: TopicLabels
    let metrics: DatabaseMetrics
    /// Nil if the status page is off.
    let overviews: OverviewCache?

    /// How long a statement for the page may take. Until one succeeds, the page shows what was read before, and when.
    private static let limit: (overview: Duration, history: Duration, usual: Duration) = (
        .seconds(1), .seconds(10), .seconds(4)
    )

    func run() {
        worker.run(bell: bell) { connection, _, succeeded in
            var historyAgain = ContinuousClock.now
            var usual = UsualLook(pause: worker.timing.history * 10)
            while !worker.stop.isAsked {
                let began = ContinuousClock.now
                var trouble: DatabaseError?
                try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
                    try labels.refresh(on: &connection)
                }
                let gauges = try DatabaseGauges(labels, on: &connection)
                trouble = trouble ?? gauges.trouble
                if let overviews {
                    try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
                        overviews.store(try Overview(within: Self.limit.overview, on: &connection))
                    }
                }
                // A look that takes a quarter of a second lengthens the pause, so that looks take a twentieth of the time at most.
                let (shortest, longest) = worker.timing.monitoring
                let pause = min(max(shortest, began.duration(to: .now) * 20), longest)
                metrics.take(gauges, until: .now + pause * 3)  // Three missed looks.
                overviews?.expect(within: pause)
                if let overviews, .now >= historyAgain {
                    let began = ContinuousClock.now
                    try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
                        overviews.store(try OverviewHistory(within: Self.limit.history, on: &connection))
                    }
                    // At most one hundredth of the time.
                    historyAgain = .now + max(worker.timing.history, began.duration(to: .now) * 100)
                }
                if let overviews { try usual.look(within: Self.limit.usual, for: overviews, on: &connection) }
                if let trouble {
                    worker.outages.lost(trouble, worker.part)
                } else {
                    succeeded()
                }
                worker.rest(bell, for: pause)
            }
        }
    }
}

/// Looks up which share of 410s is usual, from time to time: it is about whole hours.
private struct UsualLook {
    let pause: Duration
    private var again = ContinuousClock.now

    init(pause: Duration) { self.pause = pause }

    mutating func look(
        within limit: Duration, for overviews: OverviewCache, on connection: inout Connection
    ) throws(DatabaseError) {
        let began = ContinuousClock.now
        guard began >= again else { return }
        // If it takes too long, the page says so.
        var tooLong: DatabaseError?
        overviews.store(
            try connection.attempt(noting: &tooLong) { connection throws(DatabaseError) in
                try UsualShare(of: .all, within: limit, on: &connection)
            })
        // At most one hundredth of the time.
        again = .now + max(pause, began.duration(to: .now) * 100)
    }
}
