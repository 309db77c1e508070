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
    private let senders: [CredentialAtWork]
    private let sendersByName: [String: CredentialAtWork]
    private let ended: EndedClients
    private var state: SendState
    private var slots: Slots
    /// Nil if sends cannot be marked.
    private let marks: SentMarks?
    var summary: SendSummary
    private let metrics: SendMetrics
    private var faults = SenderFaults()
    private var clock = ClockWatch()
    private var otherEnvironment = OtherEnvironment()
    private let choice: CredentialChoice
    /// By `campaign_id`.
    private var contents: [Int64: Outbox.CampaignContent] = [:]
    /// The campaign that was addressed last.
    private var addressedLast: Int64 = 0
    private let audiences: SlowAudiences

    /// The most requests of one claim.
    private static let mostPerClaim = 1000

    /// The most topics of one claim.
    private static let topicsPerClaim = 50

    /// The contents of this many campaigns are kept, even while there is nothing to claim.
    private static let mostContents = 100

    /// How long to address campaigns before something else is done.
    private static let addressesFor: Duration = .milliseconds(100)

    /// - Parameters:
    ///   - ended: Notes which of them have outcomes, by their place.
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
    private var notices: [WaitingProblem] {
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

    private var progress = Progress()
    /// The last `operation_id` that this daemon knows; nil while nothing pauses.
    private var lastOperation: Int64?

    /// The looks for campaigns and for requests. A claim is no chore: it fails for its topic or its campaign alone.
    private(set) var chores = Chores()

    /// What the pipeline has met since the last call.
    mutating func takeProgress() -> Progress {
        defer { progress = Progress() }
        return progress
    }

    /// Looks for servers that blame the sender, and for notices, and logs what is new.
    mutating func reportFaults() {
        summary.report(notices: notices)
        for sender in senders {
            for (environment, fault) in sender.client.state.faults {
                let scope = CredentialScope(
                    credential: sender.credential.settings.name, environment: environment.rawValue)
                if faults.take(fault, of: scope, at: .now) { summary.blamed(scope, fault.goAway) }
            }
        }
    }

    /// Reads the files of the credentials that have changed, and tries the new content at once.
    ///
    /// - Returns: Whether anything is new.
    mutating func refreshCredentials() -> Bool {
        let renewed = senders.filter { $0.credential.refresh() }
        for sender in renewed {
            summary.renewed(sender.credential)
            for environment in sender.credential.settings.environments { sender.client.reconnect(environment) }
            state.resume(credential: sender.credential.settings.name)
        }
        return !renewed.isEmpty
    }

    /// Notes whether APNs accepts the current provider token: then other daemons may have it.
    private func judge(_ token: ProviderToken, by outcomes: [PushOutcome]) {
        let awaitsProof = token.awaitsProof
        for outcome in outcomes {
            guard let text = outcome.authorization, case .answered(let answer) = outcome.end else { continue }
            switch answer.status {
            case 200, 410: if awaitsProof, Interpretation.isOfAPNs(answer) { token.was(accepted: true, text) }
            case 429: if answer.reason == "TooManyProviderTokenUpdates" { token.was(accepted: false, text) }
            default: break
            }
        }
    }

    /// Takes the provider tokens of other daemons, and gives them those that APNs has accepted from this one.
    mutating func shareTokens(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        // Credentials may have one key. Of two keys with one identifier, one is wrong.
        let tokens = Array(
            Dictionary(senders.compactMap(\.credential.loaded?.token).map { ($0.key, $0) }) { $0.awaitsProof ? $1 : $0 }
                .values)
        if tokens.isEmpty { return }
        try attempt("share provider tokens", on: &connection) { _, connection throws(DatabaseError) in
            try outbox.exchangeTokens(on: &connection) { shared in
                ProviderTokens.take(shared, tokens)
                return tokens.compactMap { $0.toShare(insteadOf: shared[$0.key], at: .now) }
            }
        }
        for token in tokens { token.keep() }
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
            perform(state.take(outcomes, of: sender.credential.settings.name, by: policy, at: .now))
        }
        metrics.publish(state.counts)
        // Before anything is written: that may take long.
        try recall(outbox, on: &connection)
        perform(state.handOver())
        perform(state.release(at: .now))
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
            // Another session has locked a whole table, or rows that are shared, such as those of `background_send`.
            if error.remedy != .retry { throw error }
            progress.lockWaits += 1
            return false
        }
        return hasWritten
    }

    /// The outcome of a round of claims.
    enum Claimed {
        case some
        /// Requests are due, but none can be sent now.
        case dueOnly
        case none
    }

    /// How long until something is to be done for a campaign or a rate.
    var pause: Duration { state.pause(at: .now) }

    /// Gives back what waits for the instant that its rate gives it: the daemon shuts down.
    mutating func giveBackPaced() { state.giveBackPaced() }

    /// Does a chore that fails alone: the rest of the turn goes on.
    private mutating func attempt(
        _ chore: String, on connection: inout Connection,
        _ work: (inout SendPipeline, inout Connection) throws(DatabaseError) -> Void
    ) throws(DatabaseError) {
        var chores = chores
        defer { self.chores = chores }
        try chores.run(chore, on: &connection) { connection throws(DatabaseError) in try work(&self, &connection) }
    }

    /// Looks for campaigns, and addresses their audience further. An audience that takes long is left to `AddressingWorker`.
    private mutating func addressCampaigns(
        at now: ContinuousClock.Instant, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        let look: Outbox.CampaignLook
        do throws(DatabaseError) {
            look = try outbox.campaignsDue(ending: state.endsCampaigns(at: now), on: &connection)
        } catch {
            // The next look tries again.
            if error.remedy != .retry { throw error }
            progress.lockWaits += 1
            return
        }
        state.take(look.due, at: now)
        state.count(expired: look.expired)
        if contents.count > Self.mostContents {
            let open = Set(look.due.map(\.id))
            contents = contents.filter { open.contains($0.key) }
        }
        for (source, error) in audiences.takeFailures() {
            if error.remedy == .retry { progress.lockWaits += 1 }
            state.failed(source, "\(error)", isPassing: [.retry, .reconnect].contains(error.remedy), at: now)
        }
        defer { audiences.want(state.toAddress(areSlow: true, at: now), of: state.slowAudiences) }
        let waiting = state.toAddress(at: now)
        // Many take several looks. Each begins after the last one of the look before.
        let next = waiting.firstIndex { $0.campaign ?? 0 > addressedLast } ?? 0
        let until = now + Self.addressesFor
        for source in waiting[next...] + waiting[..<next] where ContinuousClock.now < until {
            guard let campaign = source.campaign else { continue }
            addressedLast = campaign
            do throws(DatabaseError) {
                if try outbox.address(campaign, ahead: SlowAudiences.ahead, on: &connection) ?? 0 > 0 {
                    state.addressed(campaign)
                }
            } catch {
                guard [.fixData, .retry].contains(error.remedy) else { throw error }
                if SlowAudiences.tookTooLong(error) {
                    state.isSlow(campaign)
                } else if error.remedy == .retry {
                    progress.lockWaits += 1
                    return
                } else {
                    state.failed(source, "\(error)", at: now)
                }
            }
        }
    }

    /// - Parameter most: 1 or more.
    private mutating func claim(
        _ turn: SendState.Turn, most: Int, backgroundPerHour: Int, at now: ContinuousClock.Instant, _ outbox: Outbox,
        on connection: inout Connection
    ) throws(DatabaseError) -> Outbox.Claim {
        guard let campaign = turn.source.campaign else {
            return try outbox.claim(
                turn.topic, most: min(most, Self.mostPerClaim), since: state.claimsFrom(turn, at: now),
                backgroundPerHour: backgroundPerHour, on: &connection)
        }
        if contents[campaign] == nil {
            contents[campaign] = try outbox.content(of: campaign, in: turn.topic, on: &connection)
        }
        guard let content = contents[campaign] else { return Outbox.Claim() }
        return try outbox.claim(
            campaign: campaign, content, most: most, backgroundPerHour: backgroundPerHour, on: &connection)
    }

    /// Claims what is due, the topics and campaigns in turn, and submits it.
    ///
    /// - Parameter looksForTopics: Whether to look for topics if that is due. Campaigns are looked for more often.
    mutating func claim(
        looksForTopics: Bool, backgroundPerHour: Int, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Claimed {
        if state.isBehind { return .none }
        let now = ContinuousClock.now
        if state.looksForCampaigns(at: now) {
            try attempt("look for campaigns", on: &connection) { pipeline, connection throws(DatabaseError) in
                try pipeline.addressCampaigns(at: now, outbox, on: &connection)
            }
        }
        if looksForTopics, state.looksForTopics(at: now) {
            try attempt("look for requests", on: &connection) { pipeline, connection throws(DatabaseError) in
                while pipeline.state.add(try outbox.scopes(after: pipeline.state.topicCursor, on: &connection)) {}
            }
        }
        // Sends what has become due meanwhile, so that it does not count as late.
        perform(state.release(at: .now))
        let turns = state.turns(at: now)
        var result = turns.isEmpty ? Claimed.none : .dueOnly
        for group in Self.groups(turns) {
            if group.count > 1 {
                let asked = state.asked(group, at: now)
                do throws(DatabaseError) {
                    let claims = try outbox.claim(asked, backgroundPerHour: backgroundPerHour, on: &connection)
                    for (turn, claim) in zip(group, claims) where take(claim, of: turn, at: now) { result = .some }
                    perform(state.release(at: .now))
                    continue
                } catch {
                    // One of them keeps the others waiting. Each on its own shows which.
                    guard [.fixData, .retry].contains(error.remedy) else { throw error }
                }
            }
            for turn in group {
                let room = state.room(for: turn)
                if room == 0 { continue }
                do throws(DatabaseError) {
                    let claim = try self.claim(
                        turn, most: room, backgroundPerHour: backgroundPerHour, at: now, outbox, on: &connection)
                    if take(claim, of: turn, at: now) { result = .some }
                } catch {
                    guard [.fixData, .retry].contains(error.remedy) else { throw error }
                    if error.remedy == .retry { progress.lockWaits += 1 }
                    state.failed(turn.source, "\(error)", isPassing: error.remedy == .retry, at: now)
                }
                perform(state.release(at: .now))
            }
        }
        return result
    }

    /// - Returns: The turns that are claimed in one transaction: several topics, or one campaign.
    private static func groups(_ turns: [SendState.Turn]) -> [ArraySlice<SendState.Turn>] {
        var groups: [ArraySlice<SendState.Turn>] = []
        var rest = turns[...]
        while !rest.isEmpty {
            let topics = rest.prefix(topicsPerClaim).prefix { $0.source.campaign == nil && !$0.isTrial }
            let group = topics.isEmpty ? rest.prefix(1) : topics
            groups.append(group)
            rest = rest.dropFirst(group.count)
        }
        return groups
    }

    /// - Returns: Whether anything was due.
    private mutating func take(
        _ claim: Outbox.Claim, of turn: SendState.Turn, at now: ContinuousClock.Instant
    ) -> Bool {
        if claim.dueAt != nil {
            progress.moved += 1
        } else if state.hasJustFound(turn) {
            // Another session has locked them, or another daemon has been faster.
            progress.lockWaits += 1
        }
        summary.add(claim)
        perform(state.take(claim, of: turn, at: now))
        return claim.dueAt != nil
    }

    private mutating func perform(_ actions: [SendState.Action]) {
        for action in actions {
            switch action {
            case .submit(let requests, let credential): client(of: credential)?.submit(requests.map { enter($0) })
            case .withdraw(let numbers, let credential):
                client(of: credential)?.withdraw(Set(numbers.compactMap { slots[$0] }))
            case .reconnect(let scope):
                guard let environment = Environment(rawValue: scope.environment) else { continue }
                client(of: scope.credential)?.reconnect(environment)
            case .logPause(_, let pause, let why): summary.pauses(for: pause, why: why)
            }
        }
    }

    private mutating func tryOtherEnvironment(after outcome: PushOutcome) {
        guard let topic = OtherEnvironment.topic(toTryAfter: outcome), let credential = choice.name(for: topic),
            let sender = sendersByName[credential],
            // A certificate may be for one environment only.
            sender.credential.settings.keyFile != nil, !state.isOnTrial(topic),
            let request = otherEnvironment.trial(after: outcome, at: .now)
        else { return }
        sender.client.submit([request])
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
