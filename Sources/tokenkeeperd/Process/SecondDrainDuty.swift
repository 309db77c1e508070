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
    /// What the drain says of the queue, and what the two have in common.
    final class Backlog: Sendable {
        let wakeup = Wakeup()
        let pair = DrainPair()
        private let isThere = Atomic(false)

        /// So many pages make a backlog: 8 MiB, some 50,000 results.
        private static let worthTwo = 1024

        /// A pass that is at work for so long has a backlog too: what was committed late is not ahead of it.
        private static let longPass: Duration = .milliseconds(250)

        /// Says how many pages have not been read yet, and since when the drain has been at them.
        func tell(pagesLeft: Int, since: ContinuousClock.Instant) {
            if pagesLeft >= Self.worthTwo || since.duration(to: .now) > Self.longPass,
                !isThere.exchange(true, ordering: .acquiringAndReleasing)
            {
                wakeup.ring()
            }
        }

        /// Whether there was a backlog since the last time.
        fileprivate func take() -> Bool { isThere.exchange(false, ordering: .acquiringAndReleasing) }
    }

    let duty: Duty
    let backlog: Backlog
    let digest: DrainDigest

    /// When the drain has seen no backlog for so long, the connection is closed. It does not look while it reads a leaf.
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
            // The sweep comes first, where connections are few. It is not ready before that.
            guard duty.configuration.secondConnection, duty.report.isComplete else {
                rest(for: .seconds(1))
                continue
            }
            do {
                if try help() { continue }
            } catch let error as DatabaseError where toldAt.map({ $0.duration(to: .now) > Self.pause.word }) ?? true {
                toldAt = .now
                duty.logger.warning(
                    "a backlog is drained by one connection alone, because a second one cannot be had",
                    metadata: ["error": "\(error)"])
            } catch {
                // Told already; or the schema has moved on, which the drain will find.
            }
            rest(for: Self.pause.again)
        }
    }

    /// Waits out a pause, whatever the drain says meanwhile.
    private func rest(for pause: Duration) {
        let until = ContinuousClock.now + pause
        while !duty.stop.isAsked, .now < until {
            backlog.wakeup.wait(for: ContinuousClock.now.duration(to: until))
        }
    }

    /// Drains until there has been no backlog for a while, or something is in the way that the drain will tell.
    ///
    /// - Returns: Whether it is of use to come again at once.
    /// - Throws: When the connection cannot be had.
    private func help() throws -> Bool {
        defer { duty.report.left(duty.part) }
        duty.report.beat(duty.part, within: Duty.grace)
        var connection = try duty.connect()
        duty.atWork.enter()
        defer { duty.atWork.leave() }
        // The drain may have said its last word before.
        defer { if duty.stop.isAsked { digest.tell() } }
        try Migrator(daemon: Daemon.version).check(&connection)
        var intake = Intake(
            lockTimeout: duty.configuration.lockTimeout, guardLimits: duty.configuration.guardLimits, isSecond: true,
            pair: backlog.pair, interpret: Interpretation.verdict(on:))
        var neededAt = ContinuousClock.now
        var pause = duty.configuration.pollBusy
        while !duty.stop.isAsked, neededAt.duration(to: .now) < Self.keptFor {
            let configuration = duty.configuration
            guard configuration.secondConnection else { return true }
            intake.lockTimeout = configuration.lockTimeout
            intake.guardLimits = configuration.guardLimits
            intake.truncates = configuration.queueTruncate
            let pass: Intake.Pass
            do {
                pass = try intake.pass(on: &connection, tell: digest.note) { _, _, _ in
                    duty.report.beat(duty.part, within: Duty.grace)
                    return !duty.stop.isAsked
                }
            } catch {
                // What was lost, the drain has lost too, or the next attempt tells.
                return false
            }
            digest.add(pass)
            if pass.trouble != nil { return false }
            if backlog.take() { neededAt = .now }
            pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
            duty.rest(backlog.wakeup, for: pause)
        }
        return true
    }
}
