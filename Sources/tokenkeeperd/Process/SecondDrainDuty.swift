internal import Dispatch
internal import Logging
internal import Synchronization
internal import TokenLedger

/// Drains beside the drain, on a connection of its own, as long as there is a backlog: PostgreSQL then records with two of its
/// processes, and what is fresh does not wait while the other reads a past leaf.
///
/// The connection is made for the backlog and closed soon afterwards. Where it cannot be had, the drain is alone.
struct SecondDrainDuty {
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
        func tell(_ soFar: Intake.Pass, pagesLeft: Int) {
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

    let duty: Duty
    let backlog: Backlog
    let digest: DrainDigest

    /// When the drain has seen no backlog for so long, the connection is closed.
    private static let keptFor: Duration = .seconds(30)

    /// The pause after it could not be had or was of no use, and between two words of that.
    private static let pause: (again: Duration, word: Duration) = (.seconds(10), .seconds(600))

    func run() {
        var toldAt: ContinuousClock.Instant?
        while !duty.stop.isAsked {
            guard backlog.take() else {
                backlog.wakeup.wait(for: .seconds(60))
                continue
            }
            // The sweep comes first, where connections are few.
            guard duty.configuration.secondConnection, duty.report.isComplete else {
                rest(for: .seconds(1))
                continue
            }
            do {
                if try help() { continue }
            } catch {
                // When PostgreSQL is away, the others find that out, and say so.
                rest(for: .seconds(1))
                if duty.report.isComplete, toldAt.map({ $0.duration(to: .now) > Self.pause.word }) ?? true {
                    toldAt = .now
                    duty.logger.warning(
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
        while !duty.stop.isAsked, .now < until {
            backlog.wakeup.wait(for: max(ContinuousClock.now.duration(to: until), .milliseconds(1)))
        }
    }

    /// Drains until there has been no backlog for a while, or something is in the way that the drain will tell.
    ///
    /// - Returns: Whether it is of use to come again at once.
    private func help() throws -> Bool {
        defer { duty.report.left(duty.part) }
        duty.report.beat(duty.part, within: Duty.grace)
        var connection = try duty.connect()
        duty.atWork.enter()
        defer { duty.atWork.leave() }
        // The drain may have said its last word before.
        defer { if duty.stop.isAsked { digest.tell() } }
        try Migrator(daemon: Daemon.version).check(&connection)
        var intake = Intake(duty.configuration, isSecond: true, pair: backlog.pair, digest: digest)
        var neededAt = ContinuousClock.now
        var lookedAt = neededAt
        var pause = duty.configuration.pollBusy
        while !duty.stop.isAsked, neededAt.duration(to: .now) < Self.keptFor {
            let configuration = duty.configuration
            guard configuration.secondConnection else { return true }
            intake.follow(configuration)
            let pass = try intake.pass(on: &connection, tell: digest.note) { _, _, _ in
                duty.report.beat(duty.part, within: Duty.grace)
                return !duty.stop.isAsked
            }
            digest.add(pass)
            if pass.trouble != nil { return false }
            // Not oftener: as long as the word stands, the drain does not ring.
            if lookedAt.duration(to: .now) > .seconds(1) {
                lookedAt = .now
                if backlog.take() || backlog.pair.isReading { neededAt = .now }
            }
            pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
            duty.rest(backlog.wakeup, for: pause)
        }
        return true
    }
}
