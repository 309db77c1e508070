internal import APNsFeedback
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import TokenLedger
internal import TokenModel

/// Sends what is queued in the outbox: runs the pipeline, turn by turn, until the process ends.
struct SendWorker {
    let worker: Worker
    let daemonID: String
    let credentials: [CredentialSource]
    let refresh: CredentialRefresh
    let bell: Wakeup
    let audiences: SlowAudiences
    let metrics: SendMetrics

    /// The pause between two busy turns: a turn then writes many endings in one transaction.
    private static let pace: Duration = .milliseconds(5)

    /// At the end: how long to wait for responses, and then for the database.
    private static let patience: (responses: Duration, writing: Duration) = (.seconds(15), .seconds(5))

    func run() {
        // Twice what can be in flight, so that the next requests are ready when responses arrive.
        let limit = 2 * worker.configuration.clientOptions.inFlight
        // One batch of a campaign may go beyond it.
        let capacity = credentials.count * Environment.allCases.count * (limit + Outbox.batch) + UnwrittenEndings.most
        let files = worker.configuration.runtimeDirectory.map { SentMarkFiles(directory: $0) }
        let marks = createMarks(files, capacity: capacity)
        let ended = EndedClients()
        let senders = startClients(marks, ended)
        metrics.watch(senders)
        var pipeline = SendPipeline(
            senders, ended, limit: limit, timing: worker.timing, marks: marks, capacity: capacity, audiences: audiences,
            summary: SendSummary(logger: worker.logger), metrics: metrics)
        pipeline.summary.begins(credentials)
        let place = ProcessScope.name(environment: ProcessInfo.processInfo.environment, daemonID: daemonID)
        var silences = SilenceWatch(worker.timing)
        worker.run(bell: bell) { connection, _, succeeded in
            var outbox = Outbox(daemonID: daemonID, processScope: place, lockTimeout: worker.configuration.lockTimeout)
            var presence = SendPresence(refresh, marks: files, worker.timing)
            var locks = SendLocks(worker.timing)
            try pipeline.reconcile(outbox, on: &connection)
            var idle = Idle(pause: worker.configuration.pollBusy)
            while !worker.stop.isAsked {
                outbox.lockTimeout = worker.configuration.lockTimeout
                try presence.keep(
                    &pipeline, outbox, &silences, locks: locks.reported, on: &connection,
                    report: worker.report.cannotSend, chores: { worker.report($0, on: &$1) })
                try turn(&pipeline, outbox, &locks, &idle, on: &connection, succeeded)
            }
            try leave(&pipeline, senders, outbox, on: &connection)
            if pipeline.isEmpty { files?.remove(daemonID) }
        }
        for sender in senders { sender.client.stop(patience: .zero) }
    }

    private func createMarks(_ files: SentMarkFiles?, capacity: Int) -> SentMarks? {
        var reason = "it has no runtime directory"
        if let files {
            do throws(MappedWords.Failure) { return try files.create(for: daemonID, slots: capacity) } catch {
                reason = error.message
            }
        }
        worker.logger.warning(
            "cannot mark which requests it sends; if it is killed, all requests that it has claimed count as sent",
            metadata: ["reason": "\(reason)"])
        return nil
    }

    private func startClients(_ marks: SentMarks?, _ ended: EndedClients) -> [CredentialAtWork] {
        var options = worker.configuration.clientOptions
        options.observer = marks
        if let (proxy, origin) = ProxySettings.described(options.route) {
            worker.logger.notice(
                "connects to APNs through a proxy", metadata: ["proxy": "\(proxy)", "from": "\(origin)"])
        }
        if worker.configuration.logLevel == .trace {
            options.trace = { [logger = worker.logger] in logger.trace("\($0)") }
        }
        let thread = PushThread()
        let senders = credentials.enumerated().map { [bell] place, credential in
            let client = PushClient(options, on: thread, identity: { try credential.identity() }) {
                ended.note(place)
                bell.ring()
            }
            return CredentialAtWork(credential: credential, client: client)
        }
        WorkerThread.start("apns") { thread.run(senders.map(\.client)) }
        return senders
    }

    /// How long nothing is due. Campaigns are looked for all the time, but topics only when the pause is over.
    private struct Idle {
        /// It doubles each time.
        var pause: Duration
        var until = ContinuousClock.now
    }

    /// Writes what has ended, claims what is due, and waits as long as there is nothing else to do.
    private func turn(
        _ pipeline: inout SendPipeline, _ outbox: Outbox, _ locks: inout SendLocks, _ idle: inout Idle,
        on connection: inout Connection, _ succeeded: () -> Void
    ) throws(DatabaseError) {
        let configuration = worker.configuration
        let hasWritten = try pipeline.finish(by: configuration.sendPolicy, outbox, on: &connection)
        let looksForTopics = hasWritten || .now >= idle.until
        let claimed = try pipeline.claim(
            looksForTopics: looksForTopics, backgroundPerHour: configuration.backgroundPerHour, outbox, on: &connection)
        try locks.note(pipeline.takeProgress(), on: &connection)
        if let holders = locks.reported {
            worker.outages.waits(for: holders, worker.part)
        } else if pipeline.chores.failures.isEmpty {
            succeeded()
        }
        pipeline.summary.reportIfDue()
        worker.report.beat(worker.part, within: Worker.grace)
        switch claimed {
        case .none where !hasWritten:
            if looksForTopics {
                idle.pause = min(idle.pause * 2, configuration.pollIdle, worker.timing.heartbeat)
                idle.until = .now + idle.pause
            }
            if locks.isMeeting || pipeline.awaitsAnswer { idle.until = min(idle.until, .now + worker.timing.soon) }
            worker.rest(
                bell,
                for: max(min(ContinuousClock.now.duration(to: idle.until), pipeline.pause), .milliseconds(1)))
            return
        // Everything due was suppressed or failed, or another session has locked it.
        case .dueOnly: worker.rest(bell, for: max(min(configuration.pollBusy, pipeline.pause), .milliseconds(1)))
        case .some, .none: usleep(UInt32(Self.pace.microseconds))
        }
        idle = Idle(pause: configuration.pollBusy)
    }

    /// Shuts down, in order: claims nothing more, waits for what is in flight, gives the rest back, signs off.
    private func leave(
        _ pipeline: inout SendPipeline, _ senders: [CredentialAtWork], _ outbox: Outbox,
        on connection: inout Connection
    ) throws(DatabaseError) {
        for sender in senders { sender.client.stop(patience: Self.patience.responses) }
        pipeline.giveBackPaced()
        let until = ContinuousClock.now + Self.patience.responses + Self.patience.writing
        let policy = worker.configuration.sendPolicy
        while !pipeline.isEmpty, .now < until {
            if try !pipeline.finish(by: policy, outbox, on: &connection) {
                worker.report.beat(worker.part, within: Worker.grace)
                bell.wait(for: .milliseconds(100))
            }
        }
        pipeline.summary.report()
        // The daemon that takes over needs the tokens.
        try pipeline.shareTokens(outbox, on: &connection)
        if pipeline.isEmpty { try outbox.signOff(on: &connection) }
    }
}
