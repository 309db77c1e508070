internal import APNsFeedback
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import TokenLedger
internal import TokenModel

/// Sends what is queued in the outbox: claims behind the gate, hands it to the clients, and writes down what became of it.
struct SendWorker {
    let worker: Worker
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
        var options = worker.configuration.clientOptions
        if worker.configuration.logLevel == .trace {
            options.trace = { [logger = worker.logger] in logger.trace("\($0)") }
        }
        let senders = credentials.map { credential in
            CredentialAtWork(
                credential: credential,
                client: PushClient(credential.identity, options, ended: { [bell] in bell.ring() }))
        }
        for sender in senders {
            // Of the name 15 bytes are shown.
            WorkerThread.start("apns \(sender.credential.settings.name)".prefix(15).description) { sender.client.run() }
        }
        // Twice what can be under way: the next are at hand when answers come.
        var pipeline = SendPipeline(senders, most: 2 * options.inFlight, summary: SendSummary(logger: worker.logger))
        pipeline.summary.begins(credentials)
        let told = LoadedCredential.told(credentials)
        let place = ProcessScope.name(environment: ProcessInfo.processInfo.environment, daemonID: daemonID)
        worker.run(bell: bell) { connection, succeeded in
            var outbox = Outbox(daemonID: daemonID, processScope: place, lockTimeout: worker.configuration.lockTimeout)
            let connectedAt = ContinuousClock.now
            var beatAt: ContinuousClock.Instant?
            var takenOverAt: ContinuousClock.Instant?
            var pause = worker.configuration.pollBusy
            try pipeline.reconcile(outbox, on: &connection)
            while !worker.stop.isAsked {
                let configuration = worker.configuration
                outbox.lockTimeout = configuration.lockTimeout
                if beatAt.map({ $0.duration(to: .now) >= Self.beatEvery }) ?? true {
                    // One that was suspended may have been taken over.
                    if let last = beatAt, last.duration(to: .now) > Outbox.silence / 2 {
                        try pipeline.reconcile(outbox, on: &connection)
                    }
                    beatAt = .now
                    let trouble = pipeline.troubles
                    pipeline.summary.report(waiting: pipeline.stuckTopics)
                    try outbox.beat(credentials: told, trouble: trouble, on: &connection)
                }
                if takenOverAt.map({ $0.duration(to: .now) >= Self.takeOverEvery }) ?? true {
                    takenOverAt = .now
                    pipeline.summary.takenOver(
                        try outbox.takeOver(
                            silentToo: connectedAt.duration(to: .now) > Self.trustsSilenceAfter, on: &connection,
                            isAlive: ProcessScope.isAlive))
                }
                let settled = try pipeline.settle(by: configuration.sendPolicy, outbox, on: &connection)
                let claim = try pipeline.claim(
                    backgroundPerHour: configuration.backgroundPerHour, outbox, on: &connection)
                succeeded()
                pipeline.summary.reportIfDue()
                worker.report.beat(worker.part, within: Worker.grace)
                switch claim {
                case .some: usleep(UInt32(Self.pace.microseconds))
                case .none where settled: usleep(UInt32(Self.pace.microseconds))
                // All of it was suppressed or failed, or somebody has locked it.
                case .dueOnly: worker.rest(bell, for: configuration.pollBusy)
                case .none:
                    pause = min(pause * 2, configuration.pollIdle, Self.beatEvery)
                    worker.rest(bell, for: pause)
                    continue
                }
                pause = configuration.pollBusy
            }
            try leave(&pipeline, senders, outbox, on: &connection)
        }
        for sender in senders { sender.client.stop(patience: .zero) }
    }

    /// The end, in order: nothing new, what is under way, what waits goes back, signOff.
    private func leave(
        _ pipeline: inout SendPipeline, _ senders: [CredentialAtWork], _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        for sender in senders { sender.client.stop(patience: Self.patience.answers) }
        let until = ContinuousClock.now + Self.patience.answers + Self.patience.writing
        let policy = worker.configuration.sendPolicy
        while !pipeline.isEmpty, .now < until {
            if try !pipeline.settle(by: policy, outbox, on: &connection) {
                worker.report.beat(worker.part, within: Worker.grace)
                bell.wait(for: .milliseconds(100))
            }
        }
        pipeline.summary.report()
        if pipeline.isEmpty { try outbox.signOff(on: &connection) }
    }
}
