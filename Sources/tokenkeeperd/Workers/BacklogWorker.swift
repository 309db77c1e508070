internal import Dispatch
internal import Logging
internal import Synchronization
internal import TokenLedger

/// Drains beside the drain, on a connection of its own, as long as there is a backlog: PostgreSQL then records with two of its
/// processes, and what is fresh does not wait while the other reads a sealed partition.
///
/// The connection is made for the backlog and closed soon afterwards. Where it cannot be had, the drain is alone.
struct BacklogWorker {
    /// What the drain says of the queue, and what the two have in common.
    final class Backlog: Sendable {
        let wakeup = Wakeup()
        let pair = DrainPair()
        private let isThere = Atomic(false)

        /// So many pages make a backlog: 8 MiB, some 40,000 to 60,000 results.
        private static let worthTwo = 1024

        /// So many batches of so many results in a row, within one pass, make one too: what was committed late does not lie ahead.
        private static let (full, inARow) = (1000, 8)
        private let batches = Mutex((results: 0, full: 0))

        /// Says what the drain has done so far in this pass, and how many pages it has not read yet.
        func report(_ soFar: Drain.Pass, pagesLeft: Int) {
            let results = soFar.taken
            let row = batches.withLock { batches in
                let isFull = results - batches.results >= Self.full
                batches = (results, isFull ? batches.full + 1 : 0)
                return batches.full
            }
            if pagesLeft >= Self.worthTwo || row >= Self.inARow,
                !isThere.exchange(true, ordering: .acquiringAndReleasing)
            {
                wakeup.ring()
            }
        }

        /// Whether there was a backlog since the last time.
        func take() -> Bool { isThere.exchange(false, ordering: .acquiringAndReleasing) }
    }

    let worker: Worker
    let backlog: Backlog
    let summary: DrainSummary

    /// When the drain has seen no backlog for so long, the connection is closed.
    private static let keptFor: Duration = .seconds(30)

    /// The pause after it could not be had or was of no use, and between two words of that.
    private static let pause: (again: Duration, word: Duration) = (.seconds(10), .seconds(600))

    func run() {
        var toldAt: ContinuousClock.Instant?
        while !worker.stop.isAsked {
            guard backlog.take() else {
                backlog.wakeup.wait(for: .seconds(60))
                continue
            }
            // The sweep comes first, where connections are few.
            guard worker.configuration.secondConnection, worker.report.isComplete else {
                rest(for: .seconds(1))
                continue
            }
            do {
                if try help() { continue }
            } catch {
                // When PostgreSQL is away, the others find that out, and say so.
                rest(for: .seconds(1))
                if worker.report.isComplete, toldAt.map({ $0.duration(to: .now) > Self.pause.word }) ?? true {
                    toldAt = .now
                    worker.logger.warning(
                        "a backlog is drained by one connection alone: a second one cannot be had, or failed",
                        metadata: ["error": "\(error)"])
                }
            }
            rest(for: Self.pause.again)
        }
    }

    /// Waits out a pause, whatever the drain says meanwhile.
    private func rest(for pause: Duration) {
        let until = ContinuousClock.now + pause
        while !worker.stop.isAsked, .now < until {
            backlog.wakeup.wait(for: max(ContinuousClock.now.duration(to: until), .milliseconds(1)))
        }
    }

    /// Drains until there has been no backlog for a while, or something is in the way that the drain will tell.
    ///
    /// - Returns: Whether it is of use to come again at once.
    private func help() throws -> Bool {
        defer { worker.report.left(worker.part) }
        worker.report.beat(worker.part, within: Worker.grace)
        var connection = try worker.connect()
        worker.atWork.enter()
        defer { worker.atWork.leave() }
        // The drain may have said its last word before.
        defer { if worker.stop.isAsked { summary.report() } }
        try Migrator(daemon: Daemon.version).check(&connection)
        var drain = Drain(worker.configuration, isSecond: true, pair: backlog.pair, summary: summary)
        var neededAt = ContinuousClock.now
        var lookedAt = neededAt
        var pause = worker.configuration.pollBusy
        while !worker.stop.isAsked, neededAt.duration(to: .now) < Self.keptFor {
            let configuration = worker.configuration
            guard configuration.secondConnection else { return true }
            drain.follow(configuration)
            let pass = try drain.pass(on: &connection, report: summary.note) { _, _, _ in
                worker.report.beat(worker.part, within: Worker.grace)
                return !worker.stop.isAsked
            }
            summary.add(pass)
            if pass.trouble != nil { return false }
            // Not oftener: as long as the word stands, the drain does not ring.
            if lookedAt.duration(to: .now) > .seconds(1) {
                lookedAt = .now
                if backlog.take() || backlog.pair.isReading { neededAt = .now }
            }
            pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
            worker.rest(backlog.wakeup, for: pause)
        }
        return true
    }
}
