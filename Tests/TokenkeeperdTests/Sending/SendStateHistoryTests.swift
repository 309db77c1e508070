import APNsFeedback
import LedgerTestSupport
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// Random histories of the sender's state, compared with a model that is as simple as the rules.
@Suite struct `The sender's decisions, in random histories` {
    @Test(arguments: [1, 3], [false, true])
    func `each request ends once, no token gets two at a time or one while it rests, and the limit holds`(
        topics: Int, campaigns: Bool
    ) {
        let seed = Seed.next()
        var (ended, withdrawn, endedOfCampaigns, returned) = (0, 0, 0, 0)
        for history in 0..<25 {
            var world = World(seed: seed &+ UInt64(history), topics: topics, campaigns: campaigns)
            for _ in 1...300 { world.step() }
            world.finish()
            if !world.problems.isEmpty {
                Issue.record("seed \(seed), history \(history): \(world.problems.prefix(3).joined(separator: "; "))")
                return
            }
            ended += world.ended
            withdrawn += world.withdrawn
            endedOfCampaigns += world.endedOfCampaigns
            returned += world.returned
        }
        #expect(withdrawn > 25, "seed \(seed)")
        #expect(ended + endedOfCampaigns > 250, "seed \(seed): the histories get somewhere")
        if campaigns {
            #expect(endedOfCampaigns > 100, "seed \(seed): so do the campaigns")
            #expect(returned > 25, "seed \(seed): batches get requests back")
        }
    }
}

/// An outbox, clients and a clock. It observes what the state does, and records violations of a rule.
private struct World {
    private enum Place: Equatable {
        case waits(due: Int64)
        /// In a batch of its campaign, which nobody has claimed, or which the daemon has not given back as a whole yet.
        case inBatch
        case claimed
        /// Another daemon has it, or somebody has deleted it.
        case takenOver
        case done
    }

    private struct Row {
        var claimed: ClaimedRequest
        var topic: TopicScope
        var queuedAt: Int64
        var place: Place
        var campaign: Int64?
        /// Which batch of its campaign; nil for a single request, which a campaign's request becomes when it does not end.
        var batch: Int?
    }

    private struct Campaign {
        var topic: TopicScope
        /// The tokens that are not addressed yet, in order.
        var audience: [Int]
        var batches = 0
        var lastOrdinal: Int64 = 0
        var isPaused = false
        var isCancelled = false
        /// When its rate allows the next claim.
        var dueAt: Int64 = 0
    }

    private var chance: SeededChance
    private var state: SendState
    private let policy = RetryPolicy(retryFor: .seconds(86_400))
    private let limit = 12
    private let topics: [TopicScope]
    /// Microseconds since the beginning, by both clocks.
    private var time: Int64 = 0
    private let start = ContinuousClock.now
    private let hasCampaigns: Bool
    private var rows: [Int64: Row] = [:]
    private var campaigns: [Int64: Campaign] = [:]
    /// The campaigns that the last look has found, and from when on they may be claimed from, as it knew.
    private var found: [Int64: Int64] = [:]
    /// By environment: the most requests of one claim from a campaign, which are whole batches.
    private var largestClaim: [String: Int] = [:]
    private var lastNumber: Int64 = 0
    private var inFlight: [TokenAddress: Int64] = [:]
    private var tokensRestUntil: [TokenAddress: Int64] = [:]
    private var pausedUntil: [ResponseEvidence.Subject: Int64] = [:]
    /// The servers and topics that have paused since a request was accepted, with the request that tries them out.
    private var trials: [ResponseEvidence.Subject: Int64?] = [:]
    private var blockedUntil: [SendState.Source: Int64] = [:]
    /// The topics with unclaimed requests, as far as the present look has come.
    private var seenWaiting: Set<TopicScope> = []
    private var pausedByOperator: Set<TopicScope> = []
    private(set) var problems: [String] = []
    private(set) var ended = 0
    private(set) var withdrawn = 0
    private(set) var endedOfCampaigns = 0
    /// How many requests went back to their batch.
    private(set) var returned = 0

    init(seed: UInt64, topics count: Int, campaigns: Bool) {
        hasCampaigns = campaigns
        chance = SeededChance(seed: seed)
        topics = (0..<count).map { TopicScope(environment: $0 == 2 ? "sandbox" : "production", topic: "t\($0)") }
        state = SendState(limit: limit, timing: .production) { _ in "main" }
    }

    private var now: SendState.Moment {
        SendState.Moment(
            clock: start + .microseconds(time), timeOfDay: Instant(microseconds: 1_800_000_000_000_000 + time))
    }

    private mutating func require(_ holds: Bool, _ rule: @autoclosure () -> String) {
        if !holds { problems.append(rule()) }
    }

    private mutating func dice(_ sides: Int) -> Int { Int.random(in: 0..<sides, using: &chance) }

    mutating func step() {
        switch dice(10) {
        case 0...1: if hasCampaigns && dice(2) == 0 { begin() } else { enqueue() }
        case 2...3: claimRound()
        case 4...6: endOne(Self.ends[dice(Self.ends.count)])
        case 7: write()
        case 8: time += [1_000, 300_000, 2_000_000, 6_000_000, 31_000_000, 1_300_000_000][dice(6)]
        default: lose()
        }
    }

    /// Finishes everything in flight, and writes everything.
    mutating func finish() {
        while !inFlight.isEmpty { endOne(dice(2) == 0 ? Self.response(200) : .withdrawn) }
        write()
        require(state.isEmpty, "something is left")
        require(!rows.values.contains { $0.place == .claimed }, "a claimed request never ended")
        state.take([], at: now.clock)
        // The rest of the current look, and some that find nothing waiting.
        for later in [0, 1, 3602] { _ = state.add(Outbox.Scopes(), at: now.clock + .seconds(later)) }
        require(state.problems(at: now.clock + .seconds(3600)).isEmpty, "an old problem is told")
    }

    private mutating func enqueue() {
        for _ in 0...dice(8) {
            lastNumber += 1
            let topic = topics[dice(topics.count)]
            add(lastNumber, to: address(of: dice(6), in: topic), place: .waits(due: time))
        }
    }

    private func address(of token: Int, in topic: TopicScope) -> TokenAddress {
        TokenAddress(
            environment: Environment(rawValue: topic.environment)!, topic: Topic(topic.topic)!,
            token: DeviceToken(hex: "a" + String(token, radix: 16))!)
    }

    private mutating func add(
        _ number: Int64, to address: TokenAddress, place: Place, campaign: Int64? = nil, batch: Int? = nil
    ) {
        let request = PushRequest(address: address, payload: [], pushType: .alert, id: "\(number)")
        rows[number] = Row(
            claimed: ClaimedRequest(number: number, request: request, firstSentAt: now.timeOfDay), topic: address.scope,
            queuedAt: time, place: place, campaign: campaign, batch: batch)
    }

    // The campaigns ----------------------------------------------------------------------------------------------------

    private mutating func begin() {
        let audience = (0..<16).filter { _ in dice(3) > 0 }
        campaigns[Int64(campaigns.count + 1)] = Campaign(topic: topics[dice(topics.count)], audience: audience)
    }

    private func isPaused(_ row: Row) -> Bool {
        pausedByOperator.contains(row.topic)
            || (row.campaign.flatMap { campaigns[$0] }.map { $0.isPaused || $0.isCancelled } ?? false)
    }

    /// The batches of a campaign that can be claimed: this daemon has none of their requests, and at least one waits.
    private func batches(of id: Int64) -> [[Int64]] {
        let own = rows.values.filter { $0.campaign == id && $0.batch != nil }
        return Dictionary(grouping: own) { $0.batch! }.sorted { $0.key < $1.key }.compactMap { _, rows in
            let waiting = rows.filter { $0.place == .inBatch }.map(\.claimed.number).sorted(by: >)
            return waiting.isEmpty || rows.contains { $0.place == .claimed } ? nil : waiting
        }
    }

    private mutating func lookForCampaigns() {
        guard state.looksForCampaigns(at: now.clock) else { return }
        found = [:]
        var due: [Outbox.DueCampaign] = []
        for (id, campaign) in campaigns.sorted(by: { $0.key < $1.key }) {
            let isOver =
                campaign.audience.isEmpty
                && !rows.values.contains { $0.campaign == id && $0.place != .done && $0.place != .takenOver }
            let isOpen = !campaign.isPaused && !campaign.isCancelled && !isOver
            guard isOpen, !pausedByOperator.contains(campaign.topic) else { continue }
            due.append(
                Outbox.DueCampaign(
                    id: id, topic: campaign.topic, hasBatches: !batches(of: id).isEmpty,
                    needsAddressing: !campaign.audience.isEmpty,
                    dueIn: .microseconds(max(campaign.dueAt - time, 0))))
            found[id] = campaign.dueAt
        }
        state.take(due, at: now.clock)
        for source in state.toAddress(at: now.clock) {
            guard let id = source.campaign, var campaign = campaigns[id] else { continue }
            require((blockedUntil[source] ?? 0) <= time, "addresses a blocked campaign")
            require(found[id] != nil && !campaign.audience.isEmpty, "addresses a campaign that needs it not")
            if dice(15) == 0 {
                state.failed(source, "no", at: now.clock)
                blockedUntil[source] = time + 30_000_000
                continue
            }
            campaign.batches += 1
            for token in campaign.audience.prefix(1 + dice(5)) {
                campaign.audience.removeFirst()
                campaign.lastOrdinal += 1
                let number = CampaignRequest(campaign: id, ordinal: campaign.lastOrdinal).number
                add(
                    number, to: address(of: token, in: campaign.topic), place: .inBatch, campaign: id,
                    batch: campaign.batches)
            }
            campaigns[id] = campaign
            state.addressed(id)
        }
    }

    /// Whole batches, up to the room; at least one.
    private mutating func claim(from id: Int64, room: Int) -> [Int64] {
        guard let campaign = campaigns[id], !campaign.isPaused, !campaign.isCancelled,
            !pausedByOperator.contains(campaign.topic), campaign.dueAt <= time
        else { return [] }
        var numbers: [Int64] = []
        for batch in batches(of: id) where numbers.isEmpty || numbers.count + batch.count <= room { numbers += batch }
        // Some have a rate.
        if id % 3 == 0, !numbers.isEmpty { campaigns[id]?.dueAt = time + 200_000 }
        let environment = campaign.topic.environment
        largestClaim[environment] = max(largestClaim[environment] ?? 0, numbers.count)
        return numbers
    }

    private mutating func changeCampaign() {
        guard let id = campaigns.keys.sorted().randomElement(using: &chance) else { return }
        switch dice(4) {
        case 0: campaigns[id]?.isPaused = true
        case 1, 2: for id in campaigns.keys { campaigns[id]?.isPaused = false }
        default:
            campaigns[id]?.isCancelled = true
            campaigns[id]?.audience = []
            for (number, row) in rows where row.campaign == id {
                if case .waits = row.place { rows[number]?.place = .done }
                if row.place == .inBatch { rows[number]?.place = .done }
            }
        }
    }

    private func isCancelled(_ row: Row) -> Bool { row.campaign.map { campaigns[$0]!.isCancelled } ?? false }

    /// A campaign's request does not end with this attempt.
    private mutating func goOn(_ row: Row, after pause: Duration?) {
        guard let id = row.campaign, let number = row.batch.map({ _ in row.claimed.number }) else { return }
        if campaigns[id]!.isCancelled {
            rows[number]?.place = .done
        } else if let pause {
            rows[number]?.place = .done
            lastNumber += 1
            add(
                lastNumber, to: row.claimed.request.address, place: .waits(due: time + pause.microseconds), campaign: id
            )
        } else {
            rows[number]?.place = .inBatch
            returned += 1
        }
    }

    // The database -----------------------------------------------------------------------------------------------------

    private func due(_ topic: TopicScope, from since: Int64 = .min) -> [(number: Int64, at: Int64)] {
        rows.values.compactMap { row in
            guard row.topic == topic, case .waits(let due) = row.place, due <= time, due >= since, !isPaused(row) else {
                return nil
            }
            return (row.claimed.number, due)
        }.sorted { ($0.at, $0.number) < ($1.at, $1.number) }
    }

    private func hasWaiting(_ topic: TopicScope) -> Bool {
        rows.values.contains { row in
            if row.topic == topic, case .waits = row.place { true } else { false }
        }
    }

    private mutating func claimRound() {
        lookForCampaigns()
        if state.looksForTopics(at: now.clock) {
            repeat {
                let rest = topics.filter { topic in state.topicCursor.map { topic.topic > $0.topic } ?? true }
                var page = Outbox.Scopes()
                page.due = rest.prefix(2).filter { !pausedByOperator.contains($0) && !due($0).isEmpty }
                page.waiting = rest.prefix(2).filter(hasWaiting)
                page.last = rest.count > 2 ? rest[1] : nil
                seenWaiting.formUnion(page.waiting)
                if page.last == nil {
                    // What nothing waits for any more is not blocked.
                    blockedUntil = blockedUntil.filter {
                        $0.key.campaign.map { found[$0] != nil } ?? seenWaiting.contains($0.key.topic)
                    }
                    seenWaiting = []
                }
                if !state.add(page, at: .now) { break }
            } while true
        }
        for turn in state.turns(at: now.clock) { claim(turn) }
        if dice(2) == 0 { write() }
        checkLimit()
    }

    private mutating func claim(_ turn: SendState.Turn) {
        for subject in subjects(of: turn.topic) {
            require((pausedUntil[subject] ?? 0) <= time, "claims for \(subject), which pauses")
        }
        require((blockedUntil[turn.source] ?? 0) <= time, "claims from a blocked topic or campaign")
        let room = state.room(for: turn)
        if let id = turn.source.campaign {
            require(found[id] ?? .max <= time, "claims from a campaign that is not due")
            // The pipeline skips it.
            if room == 0 { return }
        }
        let since = state.claimsFrom(turn, at: now.clock)
        if dice(15) == 0 {
            state.failed(turn.source, "no", at: now.clock)
            blockedUntil[turn.source] = time + 30_000_000
            return
        }
        var claim = Outbox.Claim()
        if let id = turn.source.campaign {
            claim.requests = self.claim(from: id, room: room).map { rows[$0]!.claimed }
            claim.dueAt = claim.requests.isEmpty ? nil : now.timeOfDay
        } else {
            let found =
                pausedByOperator.contains(turn.topic)
                ? [] : due(turn.topic, from: since == .distantPast ? .min : since.microseconds).prefix(room)
            claim.requests = found.map { rows[$0.number]!.claimed }.sorted { $0.number < $1.number }
            claim.dueAt = found.last.map { Instant(microseconds: $0.at) }
        }
        for request in claim.requests { rows[request.number]?.place = .claimed }
        if dice(25) == 0 {
            // The response to the COMMIT was lost.
            perform(state.reconcile(claimed: claimedNumbers))
        } else {
            blockedUntil[turn.source] = nil
            let actions = state.take(claim, of: turn, at: now.clock)
            checkTrial(actions, of: turn)
            perform(actions)
        }
    }

    private func subjects(of topic: TopicScope) -> [ResponseEvidence.Subject] {
        [.server(CredentialScope(credential: "main", environment: topic.environment)), .topic(topic)]
    }

    private mutating func checkTrial(_ actions: [SendState.Action], of turn: SendState.Turn) {
        guard let subject = subjects(of: turn.topic).first(where: { trials[$0] != nil }),
            let underWay = trials[subject],
            case .submit(let requests, _)? = actions.first
        else { return }
        require(turn.trial == subject, "\(subject) is not tried")
        require(requests.count == 1, "\(requests.count) requests try \(subject) out")
        require(underWay == nil, "a second request tries \(subject) out")
        trials[subject] = .some(requests[0].number)
    }

    private var claimedNumbers: Set<Int64> { Set(rows.filter { $0.value.place == .claimed }.keys) }

    private mutating func checkLimit() {
        guard state.nextWrite == nil else { return }
        let limit = limit
        for (environment, rows) in Dictionary(grouping: rows.values, by: \.topic.environment) {
            let shared = topics.count { $0.environment == environment }
            let count = rows.count { $0.place == .claimed }
            let beyond = largestClaim[environment] ?? 0
            require(
                count <= limit + shared - 1 + beyond,
                "\(count) requests of \(environment) are claimed, the limit is \(limit), and a batch \(beyond)")
        }
    }

    private mutating func write() {
        while let endings = state.nextWrite {
            for ending in endings { end(ending) }
            state.wrote()
        }
    }

    private mutating func end(_ ending: RequestEnding) {
        guard let row = rows[ending.number] else { return require(false, "\(ending.number) was never queued") }
        if row.place == .takenOver { return }
        require(row.place == .claimed, "\(ending.number) ends twice")
        require(inFlight[row.claimed.request.address] != ending.number, "\(ending.number) ends while it is in flight")
        let isCancelled = self.isCancelled(row)
        switch ending.fate {
        case .answered, .failed:
            rows[ending.number]?.place = .done
            if row.campaign == nil { ended += 1 } else { endedOfCampaigns += 1 }
        case .later(let pause, _), .refused(let pause, _), .interrupted(let pause, _), .returned(.some(let pause)):
            require(pause >= .zero, "a negative pause")
            if row.batch != nil { return goOn(row, after: pause) }
            rows[ending.number]?.place = isCancelled ? .done : .waits(due: time + pause.microseconds)
        case .returned(nil):
            if row.batch != nil { return goOn(row, after: nil) }
            rows[ending.number]?.place = isCancelled ? .done : .waits(due: row.queuedAt)
        }
    }

    /// Loses the connection to the database, or some queued requests to another daemon; or an operator resumes the topics.
    private mutating func lose() {
        switch dice(hasCampaigns ? 8 : 6) {
        case 0:
            for topic in pausedByOperator {
                for subject in subjects(of: topic) { (pausedUntil[subject], trials[subject]) = (nil, nil) }
            }
            state.resume(Array(pausedByOperator))
            pausedByOperator = []
        case 1:
            for (number, row) in rows.sorted(by: { $0.key < $1.key })
            where row.place == .claimed && dice(6) == 0 {
                rows[number]?.place = .takenOver
            }
            perform(state.reconcile(claimed: claimedNumbers))
        case 2: pausedByOperator.insert(topics[dice(topics.count)])
        case 3: recall(state.toLookUp(at: now.clock))
        case 4:
            // Somebody deletes all requests of a token.
            guard let address = inFlight.keys.randomElement(using: &chance) else { return }
            for (number, row) in rows where row.claimed.request.address == address && row.place != .done {
                rows[number]?.place = .takenOver
            }
        case 5: perform(state.reconcile(claimed: claimedNumbers))
        default: changeCampaign()
        }
    }

    // The clients ------------------------------------------------------------------------------------------------------

    private mutating func perform(_ actions: [SendState.Action]) {
        for action in actions {
            switch action {
            case .submit(let requests, let credential):
                require(credential == "main", "sent with another credential")
                for request in requests { submit(request) }
            case .withdraw(let numbers, let credential):
                require(credential == "main", "withdrawn from another client")
                for number in numbers { withdraw(number) }
            case .withdrawUnsent(let numbers, _):
                // The client has sent the others.
                for number in numbers where dice(2) == 0 { withdraw(number) }
            case .reconnect: break
            case .logPause(let subject, let pause, _):
                pausedUntil[subject] = time + pause.microseconds
                trials[subject] = .some(nil)
                // What the state does not know is not blocked.
                if case .topic(let topic) = subject { found = found.filter { campaigns[$0.key]!.topic != topic } }
            }
        }
    }

    private mutating func submit(_ claimed: ClaimedRequest) {
        let (number, request) = (claimed.number, claimed.request)
        require(rows[number]?.place == .claimed, "\(number) is sent and not claimed")
        require(!isPaused(rows[number]!), "\(number) is sent, and its topic or campaign is paused")
        require(inFlight[request.address] == nil, "\(number) is the token's second request in flight")
        require((tokensRestUntil[request.address] ?? 0) <= time, "\(number) is sent while its token rests")
        inFlight[request.address] = number
    }

    /// The client gives a request back, unless it has sent it.
    private mutating func withdraw(_ number: Int64) {
        guard let row = rows[number], inFlight[row.claimed.request.address] == number else { return }
        let isPaused = self.isPaused(row) || subjects(of: row.topic).contains { trials[$0] != nil }
        require(row.place != .claimed || isPaused, "\(number) is withdrawn for no reason")
        withdrawn += 1
        if dice(2) == 0 { end(row.claimed.request.address, number, .withdrawn) }
    }

    private mutating func endOne(_ end: PushOutcome.End) {
        guard let (address, number) = inFlight.sorted(by: { $0.value < $1.value }).randomElement(using: &chance) else {
            return
        }
        self.end(address, number, end)
    }

    private mutating func end(_ address: TokenAddress, _ number: Int64, _ end: PushOutcome.End) {
        inFlight[address] = nil
        if end == Self.gone || end == Self.bad { tokensRestUntil[address] = time + 2_000_000 }
        if end == Self.tooMany { tokensRestUntil[address] = time + 60_000_000 }
        let outcome = PushOutcome(
            request: rows[number]!.claimed.request, sentAt: now.timeOfDay, sends: 1, end: end)
        for subject in subjects(of: address.scope) {
            guard let underWay = trials[subject] else { continue }
            if case .server = subject, Self.judgments.contains(end) {
                (trials[subject], pausedUntil[subject]) = (nil, nil)
            } else if Self.acceptances.contains(end) {
                (trials[subject], pausedUntil[subject]) = (nil, nil)
            } else if underWay == number {
                trials[subject] = .some(nil)
            }
        }
        perform(state.take([outcome], of: "main", by: policy, at: now))
        recall(state.toLookUp(at: now.clock))
        perform(state.pauseSilent(at: now.clock))
        perform(state.handOver())
    }

    private mutating func recall(_ numbers: [Int64]) {
        var recalled = Outbox.Recalled()
        recalled.paused = Set(
            numbers.filter { rows[$0]?.place == .claimed && isPaused(rows[$0]!) })
        recalled.gone = Set(numbers.filter { rows[$0]?.place != .claimed })
        perform(state.take(recalled, among: numbers, at: now.clock))
    }

    private static func response(_ status: Int32, _ body: String? = nil) -> PushOutcome.End {
        .answered(PushResponse(status: status, body: body, apnsID: status == 200 ? "id" : nil))
    }

    private static func lost(_ kind: PushFailure.Kind, mayHaveArrived: Bool) -> PushOutcome.End {
        .unanswered(PushFailure(kind: kind, message: "lost", mayHaveArrived: mayHaveArrived))
    }

    private static let gone = response(410, #"{"reason":"Unregistered","timestamp":1700000000000}"#)
    private static let bad = response(400, #"{"reason":"BadDeviceToken"}"#)
    private static let tooMany = response(429, #"{"reason":"TooManyRequests"}"#)
    private static let disallowed = response(400, #"{"reason":"TopicDisallowed"}"#)
    private static let acceptances = [response(200), gone, bad]
    /// With these, APNs has judged the request, and so accepts the credential.
    private static let judgments =
        acceptances + [response(400, #"{"reason":"PayloadEmpty"}"#), tooMany, disallowed]
    private static let ends: [PushOutcome.End] = [
        response(200), response(200), response(200), response(200), response(200), response(200), gone, gone, bad,
        response(400, #"{"reason":"PayloadEmpty"}"#), tooMany, disallowed, disallowed,
        response(429, #"{"reason":"TooManyProviderTokenUpdates"}"#), response(503), response(503), response(503),
        response(403, #"{"reason":"InvalidProviderToken"}"#), response(308),
        lost(.connectionLost, mayHaveArrived: true),
        lost(.connect, mayHaveArrived: false), lost(.backingOff, mayHaveArrived: false), .withdrawn,
        .unsendable("too long"),
    ]
}
