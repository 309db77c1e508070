internal import Dispatch
internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Helps the drain on a second connection while there is a backlog in either queue. Two server processes then work, and new rows do
/// not wait while the primary reads a partition in bulk.
///
/// The connection is opened for a backlog and closed soon afterwards. If it cannot be opened, the primary works alone.
struct BacklogWorker {
    /// Whether there is a backlog, as the primary drain sees it, and what the two drains share.
    final class Backlog: Sendable {
        let wakeup = Wakeup()
        let pair = DrainPair()
        private let isThere = Atomic(false)

        /// This many unread pages are a backlog: 8 MiB, some 40,000 to 60,000 rows.
        private static let worthTwo = 1024

        /// This many consecutive batches of at least this many rows within one pass are a backlog, too: rows that were
        /// committed late are behind the cursor, and not among the unread pages.
        private static let (full, inARow) = (1000, 8)
        private let batches = Mutex((rows: 0, full: 0))

        /// - Parameters:
        ///   - soFar: What the primary drain has done so far in this pass.
        ///   - pagesLeft: How many pages it has not read yet.
        func report(_ soFar: Drain.Pass, pagesLeft: Int) {
            let rows = soFar.taken
            let row = batches.withLock { batches in
                let isFull = rows - batches.rows >= Self.full
                batches = (rows, isFull ? batches.full + 1 : 0)
                return batches.full
            }
            if pagesLeft >= Self.worthTwo || row >= Self.inARow,
                !isThere.exchange(true, ordering: .acquiringAndReleasing)
            {
                wakeup.ring()
            }
        }

        /// Whether there has been a backlog since the last call. Until this call, a further backlog does not ring again.
        func take() -> Bool { isThere.exchange(false, ordering: .acquiringAndReleasing) }
    }

    let worker: Worker
    let backlog: Backlog
    let summary: DrainSummary

    /// Between two warnings of a failure.
    private static let warnsEvery: Duration = .seconds(600)

    func run() {
        var warnedAt: ContinuousClock.Instant?
        while !worker.stop.isAsked {
            guard backlog.take() else {
                backlog.wakeup.wait(for: .seconds(60))
                continue
            }
            // If connections are scarce, the other workers get theirs first.
            guard worker.configuration.secondConnection, worker.report.isComplete else {
                rest(for: worker.timing.soon)
                continue
            }
            do {
                if try help() { continue }
            } catch {
                // When PostgreSQL itself is unreachable, the other workers notice and report it.
                rest(for: worker.timing.soon)
                if worker.report.isComplete, warnedAt.map({ $0.duration(to: .now) > Self.warnsEvery }) ?? true {
                    warnedAt = .now
                    worker.logger.warning(
                        "a backlog is drained by one connection alone: the second connection failed or could not be opened",
                        metadata: ["error": "\(error)"])
                }
            }
            rest(for: worker.timing.secondConnection.retry)
        }
    }

    /// Waits for the whole pause, even if a backlog is reported meanwhile.
    private func rest(for pause: Duration) {
        let until = ContinuousClock.now + pause
        while !worker.stop.isAsked, .now < until {
            backlog.wakeup.wait(for: max(ContinuousClock.now.duration(to: until), .milliseconds(1)))
        }
    }

    /// Opens the connection and drains until there has been no backlog for a while.
    ///
    /// - Returns: False after a problem that the primary drain reports: then pause before the next attempt.
    private func help() throws -> Bool {
        defer { worker.report.left(worker.part) }
        worker.report.beat(worker.part, within: Worker.grace)
        var connection = try worker.connect()
        worker.atWork.enter()
        defer { worker.atWork.leave() }
        // The primary may have written its last summary already.
        defer { if worker.stop.isAsked { summary.report() } }
        try Migrator(daemon: Daemon.version).check(&connection)
        return try drain(&connection)
    }

    private func drain(_ connection: inout Connection) throws -> Bool {
        var drain = Drain(worker.configuration, role: .helper, pair: backlog.pair, summary: summary)
        var neededAt = ContinuousClock.now
        var lookedAt = neededAt
        var pause = worker.configuration.pollBusy
        while !worker.stop.isAsked, neededAt.duration(to: .now) < worker.timing.secondConnection.kept {
            let configuration = worker.configuration
            guard configuration.secondConnection else { return true }
            drain.follow(configuration)
            let pass = try makePass(of: &drain, on: &connection)
            summary.add(pass)
            if pass.trouble != nil { return false }
            // Once a second: each call of `take` lets the primary ring again.
            if lookedAt.duration(to: .now) > .seconds(1) {
                lookedAt = .now
                if backlog.take() || backlog.pair.isReading { neededAt = .now }
            }
            pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
            worker.rest(backlog.wakeup, for: pause)
        }
        return true
    }

    /// Makes a pass. If it fails, what it had done is committed, and counts.
    private func makePass(of drain: inout Drain, on connection: inout Connection) throws(DatabaseError) -> Drain.Pass {
        var soFar = Drain.Pass()
        do {
            let pass = try drain.pass(on: &connection, report: summary.note) { _, done, _ throws(DatabaseError) in
                summary.settled(done, since: soFar)
                soFar = done
                worker.report.beat(worker.part, within: Worker.grace)
                return !worker.stop.isAsked
            }
            summary.settled(pass, since: soFar)
            return pass
        } catch {
            summary.add(soFar)
            throw error
        }
    }
}
