internal import APNsFeedback
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import TokenLedger
internal import TokenModel

/// Sends what is queued in the outbox: claims behind the gate, hands it to the clients, and writes down what became of it.
struct SendDuty {
    let duty: Duty
    let daemonID: String
    let credentials: [LoadedCredential]
    let bell: Wakeup

    private static let beatEvery: Duration = .seconds(5)
    private static let takeOverEvery: Duration = .seconds(10)

    /// Between two turns: so that a turn writes down many endings, and not one.
    private static let pace: Duration = .milliseconds(5)

    /// At the end, what is under way is waited for so long; then a moment to write it down.
    private static let patience: (answers: Duration, writing: Duration) = (.seconds(15), .seconds(5))

    func run() {
        let options = duty.configuration.clientOptions
        let senders = credentials.map { credential in
            CredentialAtWork(
                credential: credential,
                client: PushClient(credential.identity, options, ended: { [bell] in bell.ring() }))
        }
        for sender in senders {
            // Of the name 15 bytes are shown.
            DutyThread.start("apns \(sender.credential.settings.name)".prefix(15).description) { sender.client.run() }
        }
        var desk = SendingDesk(senders, digest: SendDigest(logger: duty.logger))
        let most = 2 * options.inFlight * senders.count
        let place = SendersPlace.name(environment: ProcessInfo.processInfo.environment, daemonID: daemonID)
        duty.run(bell: bell) { connection, succeeded in
            var outbox = Outbox(daemonID: daemonID, place: place, lockTimeout: duty.configuration.lockTimeout)
            var beatAt: ContinuousClock.Instant?
            var takenOverAt: ContinuousClock.Instant?
            var uncovered: [Outbox.Lane] = []
            var pause = duty.configuration.pollBusy
            while !duty.stop.isAsked {
                let configuration = duty.configuration
                outbox.lockTimeout = configuration.lockTimeout
                if beatAt.map({ $0.duration(to: .now) >= Self.beatEvery }) ?? true {
                    beatAt = .now
                    let trouble = troubles(uncovered)
                    desk.digest.tell(trouble)
                    try outbox.beat(credentials: LoadedCredential.told(credentials), trouble: trouble, on: &connection)
                }
                if takenOverAt.map({ $0.duration(to: .now) >= Self.takeOverEvery }) ?? true {
                    takenOverAt = .now
                    desk.digest.takenOver(try outbox.takeOver(on: &connection, isAlive: SendersPlace.isAlive))
                }
                var goesOn = try desk.settle(by: configuration.sendPolicy, outbox, on: &connection)
                if try desk.claim(
                    most: most, backgroundPerHour: configuration.backgroundPerHour, outbox, on: &connection,
                    uncovered: &uncovered)
                {
                    goesOn = true
                }
                succeeded()
                desk.digest.tellIfDue()
                duty.report.beat(duty.part, within: Duty.grace)
                if goesOn {
                    usleep(UInt32(Self.pace.microseconds))
                    pause = configuration.pollBusy
                } else {
                    pause = min(pause * 2, configuration.pollIdle)
                    duty.rest(bell, for: pause)
                }
            }
            try leave(&desk, senders, outbox, on: &connection)
        }
        for sender in senders { sender.client.stop(patience: .zero) }
    }

    /// The end, in order: nothing new, what is under way, what waits goes back, farewell.
    private func leave(
        _ desk: inout SendingDesk, _ senders: [CredentialAtWork], _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        for sender in senders { sender.client.stop(patience: Self.patience.answers) }
        let until = ContinuousClock.now + Self.patience.answers + Self.patience.writing
        let policy = duty.configuration.sendPolicy
        while !desk.isEmpty, .now < until {
            if try !desk.settle(by: policy, outbox, on: &connection) {
                duty.report.beat(duty.part, within: Duty.grace)
                bell.wait(for: .milliseconds(100))
            }
        }
        desk.digest.tell()
        if desk.isEmpty { try outbox.farewell(on: &connection) }
    }

    /// What keeps requests waiting, or soon will, in words.
    private func troubles(_ uncovered: [Outbox.Lane]) -> [String] {
        uncovered.prefix(20).map {
            "no credential is configured for \($0.topic) (\($0.environment)): its requests wait"
        }
    }
}
