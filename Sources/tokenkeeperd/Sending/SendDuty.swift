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

    /// When the database was away, others come back no sooner than this daemon: so long it takes nobody for silent.
    private static let trustsSilenceAfter: Duration = .seconds(30)

    /// Between two turns: so that a turn writes down many endings, and not one.
    private static let pace: Duration = .milliseconds(5)

    /// At the end, what is under way is waited for so long; then a moment to write it down.
    private static let patience: (answers: Duration, writing: Duration) = (.seconds(15), .seconds(5))

    func run() {
        var options = duty.configuration.clientOptions
        if duty.configuration.logLevel == .trace { options.trace = { [logger = duty.logger] in logger.trace("\($0)") } }
        let senders = credentials.map { credential in
            CredentialAtWork(
                credential: credential,
                client: PushClient(credential.identity, options, ended: { [bell] in bell.ring() }))
        }
        for sender in senders {
            // Of the name 15 bytes are shown.
            DutyThread.start("apns \(sender.credential.settings.name)".prefix(15).description) { sender.client.run() }
        }
        // Twice what can be under way: the next are at hand when answers come.
        var desk = SendingDesk(senders, most: 2 * options.inFlight, digest: SendDigest(logger: duty.logger))
        desk.digest.begins(credentials)
        let told = LoadedCredential.told(credentials)
        let place = SendersPlace.name(environment: ProcessInfo.processInfo.environment, daemonID: daemonID)
        duty.run(bell: bell) { connection, succeeded in
            var outbox = Outbox(daemonID: daemonID, place: place, lockTimeout: duty.configuration.lockTimeout)
            let connectedAt = ContinuousClock.now
            var beatAt: ContinuousClock.Instant?
            var takenOverAt: ContinuousClock.Instant?
            var pause = duty.configuration.pollBusy
            try desk.reconcile(outbox, on: &connection)
            while !duty.stop.isAsked {
                let configuration = duty.configuration
                outbox.lockTimeout = configuration.lockTimeout
                if beatAt.map({ $0.duration(to: .now) >= Self.beatEvery }) ?? true {
                    // One that was suspended may have been taken over.
                    if let last = beatAt, last.duration(to: .now) > Outbox.silence / 2 {
                        try desk.reconcile(outbox, on: &connection)
                    }
                    beatAt = .now
                    let trouble = desk.troubles
                    desk.digest.tell(waiting: desk.stuckTopics)
                    try outbox.beat(credentials: told, trouble: trouble, on: &connection)
                }
                if takenOverAt.map({ $0.duration(to: .now) >= Self.takeOverEvery }) ?? true {
                    takenOverAt = .now
                    desk.digest.takenOver(
                        try outbox.takeOver(
                            silentToo: connectedAt.duration(to: .now) > Self.trustsSilenceAfter, on: &connection,
                            isAlive: SendersPlace.isAlive))
                }
                let settled = try desk.settle(by: configuration.sendPolicy, outbox, on: &connection)
                let claim = try desk.claim(
                    backgroundPerHour: configuration.backgroundPerHour, outbox, on: &connection)
                succeeded()
                desk.digest.tellIfDue()
                duty.report.beat(duty.part, within: Duty.grace)
                switch claim {
                case .some: usleep(UInt32(Self.pace.microseconds))
                case .none where settled: usleep(UInt32(Self.pace.microseconds))
                // All of it was suppressed or given up, or somebody has locked it.
                case .dueOnly: duty.rest(bell, for: configuration.pollBusy)
                case .none:
                    pause = min(pause * 2, configuration.pollIdle, Self.beatEvery)
                    duty.rest(bell, for: pause)
                    continue
                }
                pause = configuration.pollBusy
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
}
