internal import APNsFeedback
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// A credential with its client.
struct CredentialAtWork: Sendable {
    let credential: CredentialSource
    let client: PushClient
}

/// The clients that have outcomes to collect, by their place in the list: with hundreds of them, few have any.
final class EndedClients: Sendable {
    private let places = Mutex<Set<Int>>([])

    func note(_ place: Int) { places.withLock { _ = $0.insert(place) } }

    /// Those that were noted since the last call, in order.
    func take() -> [Int] {
        places.withLock { places in
            if places.isEmpty { return [] }
            defer { places = [] }
            return places.sorted()
        }
    }
}

/// Performs what `SendState` decides: submits requests to the clients, claims them from the outbox and writes their endings.
///
/// It lives as long as the process. A lost connection to the database ends a turn and leaves the state as it is.
struct SendPipeline {
    let senders: [CredentialAtWork]
    let sendersByName: [String: CredentialAtWork]
    private let ended: EndedClients
    var state: SendState
    private var slots: Slots
    /// Nil if sends cannot be marked.
    private let marks: SentMarks?
    var summary: SendSummary
    private let metrics: SendMetrics
    var faults = SenderFaults()
    var databaseClock = SendState.DatabaseClock()
    var clock = ClockWatch()
    var otherEnvironment = OtherEnvironment()
    let choice: CredentialChoice
    /// By `campaign_id`.
    var contents: [Int64: Outbox.CampaignContent] = [:]
    /// The campaign that was addressed last.
    var addressedLast: Int64 = 0
    let audiences: SlowAudiences

    /// - Parameters:
    ///   - ended: Notes which senders have outcomes, by their place.
    ///   - limit: The most requests that a credential may hold for an environment.
    ///   - marks: Nil if sends cannot be marked.
    ///   - capacity: How many requests `marks` has a place for.
    ///   - audiences: Takes the campaigns whose audience takes long to find.
    init(
        _ senders: [CredentialAtWork], _ ended: EndedClients, limit: Int, timing: Timing, marks: SentMarks?,
        capacity: Int,
        audiences: SlowAudiences,
        summary: SendSummary, metrics: SendMetrics
    ) {
        self.senders = senders
        self.ended = ended
        self.marks = marks
        self.audiences = audiences
        slots = Slots(capacity: capacity)
        self.summary = summary
        self.metrics = metrics
        choice = CredentialChoice(senders.map(\.credential.settings))
        let byName = Dictionary(uniqueKeysWithValues: senders.map { ($0.credential.settings.name, $0) })
        sendersByName = byName
        state = SendState(
            limit: limit, timing: timing, key: { byName[$0]?.credential.settings.key ?? $0 }, credential: choice.name)
    }

    var isEmpty: Bool { state.isEmpty }
    /// What keeps requests waiting, except servers that blame the sender: these are logged on their own.
    var waiting: [WaitingProblem] {
        senders.compactMap(\.credential.fault).first(20, of: "credentials").map(WaitingProblem.init)
            + state.waiting(at: .now)
    }
    var problems: [String] {
        waiting.map(\.words) + faults.problems + notices.map(\.words)
    }
    /// What an operator should know although it keeps nothing waiting.
    var notices: [WaitingProblem] {
        [clock.problem].compactMap { $0 } + otherEnvironment.problems(at: .now)
    }
    /// A JSON array that describes the credentials that can be used: see `LoadedCredential`.
    var credentials: String { LoadedCredential.described(senders.map(\.credential)) }
    /// Whether a request has been submitted, and none of its credential has been answered since.
    var awaitsAnswer: Bool { state.awaitsAnswer }

    /// What the pipeline has met.
    struct Progress {
        /// How many times a lock of another session kept requests in the outbox, or their endings from being written.
        var lockWaits = 0
        /// How many times requests were claimed or finished.
        var moved = 0
    }

    var progress = Progress()
    /// The last `operation_id` that this daemon knows; nil while nothing pauses.
    private var lastOperation: Int64?

    /// The looks for campaigns and for requests. A claim is no chore: it fails for its topic or its campaign alone.
    var chores = Chores()

    /// What the pipeline has met since the last call.
    mutating func takeProgress() -> Progress {
        defer { progress = Progress() }
        return progress
    }

    /// Ends the pauses of topics that a person has resumed since the last call.
    mutating func resume(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        guard state.isPausing else {
            lastOperation = nil
            return
        }
        let resumed = try outbox.resumed(after: lastOperation, on: &connection)
        lastOperation = resumed.last
        state.resume(resumed.topics)
    }

    /// Does a chore that fails alone: the rest of the turn goes on.
    mutating func attempt(
        _ chore: String, on connection: inout Connection,
        _ work: (inout SendPipeline, inout Connection) throws(DatabaseError) -> Void
    ) throws(DatabaseError) {
        var chores = chores
        defer { self.chores = chores }
        try chores.run(chore, on: &connection) { connection throws(DatabaseError) in try work(&self, &connection) }
    }

    /// Gives back the requests that this daemon has claimed according to the database, but that the state does not know.
    mutating func reconcile(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        perform(state.reconcile(claimed: try outbox.claimed(on: &connection)))
    }

    /// Looks up which requests must not be sent any more: somebody may have paused their topic or forgotten their token.
    private mutating func recall(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        let asked = state.toLookUp(at: .now)
        if asked.isEmpty { return }
        let recalled = try outbox.recalled(among: asked, on: &connection)
        perform(state.take(recalled, among: asked, at: .now))
    }

    /// Takes outcomes from the clients, submits the next requests of their tokens, and writes what became of the requests.
    ///
    /// - Returns: Whether it wrote anything. False as well if another session has locked a row: the next turn tries again.
    mutating func finish(
        by policy: RetryPolicy, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        for place in ended.take() {
            let sender = senders[place]
            let collected = sender.client.collect()
            let outcomes = collected.filter { !OtherEnvironment.isTrial($0) }
            for trial in collected where OtherEnvironment.isTrial(trial) { otherEnvironment.ended(trial) }
            clock.note(outcomes, at: .now)
            summary.named(outcomes)
            if let token = sender.credential.loaded?.token { judge(token, by: outcomes) }
            for outcome in outcomes { tryOtherEnvironment(after: outcome) }
            metrics.record(outcomes)
            perform(state.take(outcomes, of: sender.credential.settings.name, by: policy, at: databaseClock.now))
        }
        metrics.publish(state.counts, unanswered: state.unanswered)
        // Before anything is written: that may take long.
        try recall(outbox, on: &connection)
        perform(state.pauseSilent(at: .now))
        perform(state.handOver())
        perform(state.release(at: databaseClock.now))
        state.retryLocked(at: .now)
        var hasWritten = false
        do throws(DatabaseError) {
            while let endings = state.nextWrite {
                let locked = try write(endings, outbox, on: &connection)
                state.wrote(except: locked)
                if !locked.isEmpty { progress.lockWaits += 1 }
                if locked.count == endings.count { continue }
                progress.moved += 1
                hasWritten = true
            }
        } catch {
            // Another session has locked a request of no campaign, a shared row such as one of `background_send`, or a whole table. What is written stays; the
            // next turn writes the rest.
            if error.remedy != .retry { throw error }
            progress.lockWaits += 1
        }
        return hasWritten
    }

    /// How long until something is to be done for a campaign or a rate.
    var pause: Duration { state.pause(at: .now) }

    /// Gives back what waits for the instant that its rate gives it: the daemon shuts down.
    mutating func giveBackPaced() { state.giveBackPaced() }

    mutating func perform(_ actions: [SendState.Action]) {
        for action in actions {
            switch action {
            case .submit(let requests, let credential): client(of: credential)?.submit(requests.map { enter($0) })
            case .withdraw(let numbers, let credential):
                client(of: credential)?.withdraw(Set(numbers.compactMap { slots[$0] }))
            case .withdrawUnsent(let numbers, let credential):
                client(of: credential)?.withdraw(Set(numbers.compactMap { slots[$0] }), ifUnsent: true)
            case .reconnect(let scope):
                guard let environment = Environment(rawValue: scope.environment) else { continue }
                client(of: scope.credential)?.reconnect(environment)
            case .logPause(_, let pause, let why): summary.pauses(for: pause, why: why)
            }
        }
    }

    private func client(of credential: String) -> PushClient? {
        sendersByName[credential]?.client
    }

    /// Enters a request among those that may be sent, before its client gets it.
    private mutating func enter(_ claimed: ClaimedRequest) -> PushRequest {
        var request = claimed.request
        request.slot = slots.take(claimed.number)
        if slots.beyond > 0 { marks?.note(beyond: slots.beyond) }
        marks?.enter(claimed.number, in: request.slot)
        return request
    }

    /// The ending of a request is committed: a daemon that takes over will not find it.
    private mutating func leave(_ number: Int64) {
        let beyond = slots.beyond
        guard let slot = slots.release(number) else { return }
        marks?.clear(slot)
        if beyond > 0 { marks?.note(beyond: slots.beyond) }
    }

    /// - Returns: The numbers of the endings that are not written, because another session has locked their requests.
    private mutating func write(
        _ endings: [RequestEnding], _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Set<Int64> {
        let locked = try outbox.finish(endings, on: &connection).locked
        for ending in endings where !locked.contains(ending.number) {
            leave(ending.number)
            summary.add(ending)
        }
        return locked
    }
}
