internal import APNsFeedback
internal import Dispatch
internal import Logging
internal import Synchronization
internal import TokenLedger

/// Drains beside the drain, on a connection of its own, as long as there is a backlog: PostgreSQL then records with two of its
/// processes, and what is fresh does not wait while the other reads a past leaf.
///
/// The connection is made for the backlog and closed soon afterwards. Where it cannot be had, the drain is alone.
struct SecondDrainDuty {
    /// What the drain says of the queue.
    final class Backlog: Sendable {
        let wakeup = Wakeup()
        private let isThere = Atomic(false)

        /// So many pages make a backlog: 8 MiB, some 40,000 results.
        private static let worthTwo = 1024

        /// Says how many pages have not been read yet.
        func tell(pagesLeft: Int) {
            if pagesLeft >= Self.worthTwo, !isThere.exchange(true, ordering: .acquiringAndReleasing) { wakeup.ring() }
        }

        /// Whether there was a backlog since the last time.
        fileprivate func take() -> Bool { isThere.exchange(false, ordering: .acquiringAndReleasing) }
    }

    let duty: Duty
    let backlog: Backlog
    let digest: DrainDigest

    /// With nothing to do for so long, the connection is closed.
    private static let keptFor: Duration = .seconds(10)

    /// The pause after it could not be had, and between two words of that.
    private static let pause: (again: Duration, word: Duration) = (.seconds(10), .seconds(600))

    func run() {
        var refusedAt: ContinuousClock.Instant?
        var toldAt: ContinuousClock.Instant?
        func passed(_ pause: Duration, since instant: ContinuousClock.Instant?) -> Bool {
            instant.map { $0.duration(to: .now) > pause } ?? true
        }
        while !duty.stop.isAsked {
            guard backlog.take(), duty.configuration.secondConnection, passed(Self.pause.again, since: refusedAt) else {
                backlog.wakeup.wait(for: .seconds(60))
                continue
            }
            do {
                try help()
            } catch {
                refusedAt = .now
                // That PostgreSQL is away, the others say. But perhaps it refuses this connection alone.
                if passed(Self.pause.word, since: toldAt) {
                    toldAt = .now
                    duty.logger.warning(
                        "a backlog is drained by one connection alone: a second one was lost, or cannot be had",
                        metadata: ["error": "\(error)"])
                }
            }
        }
    }

    /// Drains until there has been nothing to do for a while.
    private func help() throws(DatabaseError) {
        defer { duty.report.left(duty.part) }
        duty.report.beat(duty.part, within: Duty.grace)
        var connection = try duty.connect()
        duty.atWork.enter()
        defer { duty.atWork.leave() }
        defer { digest.tell() }
        var configuration = duty.configuration
        var intake = Intake(
            lockTimeout: configuration.lockTimeout, guardLimits: configuration.guardLimits,
            truncates: configuration.queueTruncate, isSecond: true, interpret: Interpretation.verdict(on:))
        var neededAt = ContinuousClock.now
        var pause = configuration.pollBusy
        while !duty.stop.isAsked, neededAt.duration(to: .now) < Self.keptFor {
            configuration = duty.configuration
            intake.lockTimeout = configuration.lockTimeout
            intake.guardLimits = configuration.guardLimits
            intake.truncates = configuration.queueTruncate
            let pass = try intake.pass(on: &connection, tell: digest.note) { _, _, _ in
                duty.report.beat(duty.part, within: Duty.grace)
                return !duty.stop.isAsked
            }
            digest.add(pass)
            // What a person must mend, the drain says.
            if pass.trouble != nil { return }
            if backlog.take() { neededAt = .now }
            pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
            duty.rest(backlog.wakeup, for: pause)
        }
    }
}
