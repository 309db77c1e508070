internal import TokenLedger
internal import TokenModel

/// From where to claim, how much, and what becomes of it.
extension SendState {
    /// How long until something is to be done for a campaign or a rate.
    func pause(at now: ContinuousClock.Instant) -> Duration {
        // What is due already waits for room.
        let dues = [paced.next(after: now), topics.nextClaim(after: now)].compactMap { $0 }
        return dues.map { max(now.duration(to: $0), Self.grain) }.reduce(campaigns.pause(at: now), min)
    }

    /// Requests that are sent by a rate go in groups of this length of time.
    private static let grain: Duration = .milliseconds(5)

    /// The most topics of a round. The others come before them in the next one.
    private static let mostTopics = 200

    /// The most topics of a round from which a trial is chosen.
    private static let mostTriers = 20

    /// With more turns than this in a round, a topic is left at once when all that it had due is claimed.
    private static let manyTurns = 16

    /// The topics and campaigns to claim from in this round.
    mutating func turns(at now: ContinuousClock.Instant) -> [Turn] {
        if isBehind { return [] }
        roomOfAll = limit * Self.mostAtOnce - servers.values.reduce(0) { $0 + $1.requests.count }
        tokens.prune(at: now)
        var ofTopics: [Turn] = []
        // Of the topics that wait for one trial, a few are enough: they must not keep the others out of the round.
        var triers: [ResponseEvidence.Subject: Int] = [:]
        for topic in topics.claimable(at: now) where ofTopics.count < Self.mostTopics {
            guard let turn = turn(of: Source(topic: topic), at: now) else { continue }
            if let trial = turn.trial {
                if triers[trial, default: 0] >= Self.mostTriers { continue }
                triers[trial, default: 0] += 1
            }
            ofTopics.append(turn)
        }
        let ofCampaigns = campaigns.claimable(at: now).compactMap {
            turn(of: Source(topic: $0.topic, campaign: $0.id), at: now)
        }
        var turns = evidence.narrow(ofTopics + ofCampaigns)
        if topics.count > Self.mostTopics { topics.moveBack(turns.lazy.map(\.topic)) }
        let sharers = Dictionary(grouping: turns, by: \.scope).mapValues(\.count)
        for index in turns.indices { turns[index].sharers = sharers[turns[index].scope] ?? 1 }
        return turns
    }

    private func turn(of source: Source, at now: ContinuousClock.Instant) -> Turn? {
        let topic = source.topic
        let scope = self.scope(of: topic)
        let subjects: [ResponseEvidence.Subject] = evidence.isQuiet ? [] : [.server(scope), .topic(topic)]
        let trial = subjects.first { evidence.isOnTrial($0) }
        if let trial, evidence.isTried(trial) { return nil }
        let hasRoom = room(in: scope) >= (trial != nil ? 1 : leastRoom)
        // A batch is larger than a small share. Each credential may have one.
        if source.campaign != nil, trial == nil, roomOfAll <= 0, servers[scope]?.requests.isEmpty == false {
            return nil
        }
        return hasRoom && !blocked.isBlocked(source, at: now)
            && !subjects.contains { evidence.isPausing($0, at: now) } && !paced.isLate(source, at: now)
            ? Turn(source: source, scope: scope, trial: trial) : nil
    }

    /// Scopes with less room are skipped: a claim of one request costs about as much as a claim of many.
    private var leastRoom: Int { max(limitOfEach / 4, 1) }

    func room(in scope: CredentialScope) -> Int { limitOfEach - (servers[scope]?.requests.count ?? 0) }

    /// How many requests each credential may hold in an environment. Many credentials at once get little each, so that memory is bounded.
    private var limitOfEach: Int { roomOfAll >= limit ? limit : smallShare }

    private var smallShare: Int { max(limit / Self.leastShare, 1) }

    /// All credentials together hold what so many of them may hold alone, and then a small share of it each.
    static let (mostAtOnce, leastShare) = (4, 64)

    /// What the turns of one transaction ask for. Together they ask for no more than there is room for, and each for a small share at least.
    mutating func asked(_ group: some Sequence<Turn>, at now: ContinuousClock.Instant) -> [Outbox.Asked] {
        var left = roomOfAll
        var asked: [Outbox.Asked] = []
        for turn in group {
            let most = min(room(for: turn), max(left, smallShare))
            left -= most
            asked.append(Outbox.Asked(turn.topic, most: most, since: claimsFrom(turn, at: now)))
        }
        return asked
    }

    /// How many requests a turn may claim: its share of the room that the earlier turns have left. A campaign gets a whole batch or
    /// nothing, and then it is the first of a later round.
    func room(for turn: Turn) -> Int {
        let room = room(in: turn.scope)
        let share = max(room / turn.sharers, 1)
        if turn.source.campaign != nil {
            let hasRoom = room >= (turn.isTrial ? 1 : leastRoom)
            return hasRoom ? max(turn.isTrial ? 1 : share, Outbox.partOfBatch) : 0
        }
        return turn.isTrial ? min(share, Trial.candidates) : share
    }

    /// Where the claim of a turn begins.
    mutating func claimsFrom(_ turn: Turn, at now: ContinuousClock.Instant) -> Instant {
        topics.claimsFrom(turn.topic, at: now)
    }

    /// Whether a look has just found that the turn's topic has requests due, and nothing of it has been claimed since.
    func hasJustFound(_ turn: Turn) -> Bool { turn.source.campaign == nil && topics.isJustFound(turn.topic) }

    /// Takes what a turn has claimed.
    mutating func take(_ claim: Outbox.Claim, of turn: Turn, at now: ContinuousClock.Instant) -> [Action] {
        blocked.unblock(turn.source)
        roomOfAll -= claim.requests.count
        counts.add(suppressed: claim.suppressed, in: turn.scope)
        if let campaign = turn.source.campaign {
            campaigns.claimed(campaign, some: claim.dueAt != nil, lastSendAt: claim.lastSendAt)
        } else {
            let isDone = claim.isComplete && turn.sharers > Self.manyTurns
            topics.claimed(turn.topic, until: isDone ? nil : claim.dueAt, lastSendAt: claim.lastSendAt, at: now)
        }
        unwritten.areClaimedAgain(claim.requests)
        // While this process was stopped, another daemon may have had and returned what it holds.
        if !paced.isEmpty { paced.withdraw(Set(claim.requests.lazy.map(\.number))) }
        if let trial = turn.trial {
            // Filtered before the choice: a chosen request must be submitted, or its trial never ends.
            let chosen = chooseTrial(
                of: trial, from: withoutResting(withoutHeld(claim.requests, in: turn.scope), at: now), turn)
            return submit(chosen, in: turn.scope, at: now)
        }
        guard claim.lastSendAt != nil else { return submit(claim.requests, in: turn.scope, at: now) }
        paced.add(withoutHeld(claim.requests, in: turn.scope), of: turn, at: now)
        return []
    }

    /// Leaves out the requests that were submitted under an earlier claim. They go on as they are.
    private func withoutHeld(_ claimed: [ClaimedRequest], in scope: CredentialScope) -> [ClaimedRequest] {
        claimed.filter { servers[scope]?.requests.holds($0) != true }
    }

    /// Gives back the requests of tokens that rest.
    private mutating func withoutResting(
        _ claimed: [ClaimedRequest], at now: ContinuousClock.Instant
    ) -> [ClaimedRequest] {
        claimed.filter { request in
            guard let rest = tokens.remaining(request.request.address, at: now) else { return true }
            unwritten.giveBack([request], after: rest)
            return false
        }
    }

    mutating func submit(
        _ claimed: [ClaimedRequest], in scope: CredentialScope, at now: ContinuousClock.Instant
    ) -> [Action] {
        let sendable = withoutResting(claimed, at: now)
        if sendable.isEmpty { return [] }
        precondition(!scope.credential.isEmpty, "claimed without a credential: \(sendable[0].request.address.scope)")
        let next = servers[scope, default: ServerState()].submit(sendable, at: now)
        return next.isEmpty ? [] : [.submit(next, credential: scope.credential)]
    }

    /// Keeps one request, and gives the others back.
    private mutating func chooseTrial(
        of subject: ResponseEvidence.Subject, from claimed: [ClaimedRequest], _ turn: Turn
    ) -> [ClaimedRequest] {
        let scope = turn.scope
        // A token's earlier request may still be in flight from before the pause.
        // One that was interrupted has only one more send.
        let candidates = claimed.filter { servers[scope]?.requests.holds($0.request.address) != true }
            .sorted { $0.attempts < $1.attempts }
        let chosen = evidence.chooseTrial(from: candidates, of: subject)
        // A campaign's batch stays together. The next trial chooses from another part of it.
        unwritten.giveBack(
            claimed.filter { $0.number != chosen?.number }, after: turn.source.campaign == nil ? Trial.othersWait : nil
        )
        return chosen.map { [$0] } ?? []
    }

    /// A claim from a topic or campaign failed because of its own requests, or a campaign could not be addressed. The others go on.
    ///
    /// - Parameter isPassing: Whether another session holds a lock, or the connection was lost: then it is soon tried again.
    mutating func failed(
        _ source: Source, _ error: String, isPassing: Bool = false, at now: ContinuousClock.Instant
    ) {
        blocked.block(source, error, isPassing: isPassing, at: now)
    }
}
