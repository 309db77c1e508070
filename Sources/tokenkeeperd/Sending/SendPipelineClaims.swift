internal import TokenLedger
internal import TokenModel

/// What the pipeline claims, and the audiences that it addresses.
extension SendPipeline {
    /// The most requests of one claim.
    private static let mostPerClaim = 1000

    /// The most topics of one claim.
    private static let topicsPerClaim = 50

    /// The contents of this many campaigns are kept, even while there is nothing to claim.
    private static let mostContents = 100

    /// How long to address campaigns before something else is done.
    private static let addressesFor: Duration = .milliseconds(100)

    /// The outcome of a round of claims.
    enum Claimed {
        case some
        /// Requests are due, but none can be sent now.
        case dueOnly
        case none
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
                try pipeline.lookForCampaigns(at: now, outbox, on: &connection)
            }
        }
        if looksForTopics, state.looksForTopics(at: now) {
            try attempt("look for requests", on: &connection) { pipeline, connection throws(DatabaseError) in
                while pipeline.state.add(
                    try outbox.scopes(after: pipeline.state.topicCursor, on: &connection), at: .now)
                {}
            }
        }
        // Sends what has become due meanwhile, so that it does not count as late.
        perform(state.release(at: databaseClock.now))
        let turns = state.turns(at: now)
        let call = Call(backgroundPerHour: backgroundPerHour, now: now, outbox: outbox)
        var hasAny = false
        for group in Self.groups(turns) where try claim(group, call, on: &connection) { hasAny = true }
        return hasAny ? .some : turns.isEmpty ? .none : .dueOnly
    }

    /// What all claims of a round have in common.
    private struct Call {
        let backgroundPerHour: Int
        let now: ContinuousClock.Instant
        let outbox: Outbox
    }

    /// Claims from several topics in one transaction; if that fails, from one after the other.
    ///
    /// - Returns: Whether anything was due.
    private mutating func claim(
        _ group: ArraySlice<SendState.Turn>, _ call: Call, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        var hasAny = false
        if group.count > 1 {
            let asked = state.asked(group, at: call.now)
            do throws(DatabaseError) {
                let claims = try call.outbox.claim(asked, backgroundPerHour: call.backgroundPerHour, on: &connection)
                for (turn, claim) in zip(group, claims) where take(claim, of: turn, at: call.now) { hasAny = true }
                perform(state.release(at: databaseClock.now))
                return hasAny
            } catch {
                // One of them keeps the others waiting. Each on its own shows which.
                guard [.fixData, .retry].contains(error.remedy) else { throw error }
            }
        }
        for turn in group {
            let room = state.room(for: turn)
            if room == 0 { continue }
            do throws(DatabaseError) {
                let claim = try self.claim(turn, most: room, call, on: &connection)
                if take(claim, of: turn, at: call.now) { hasAny = true }
            } catch {
                guard [.fixData, .retry].contains(error.remedy) else { throw error }
                if error.remedy == .retry { progress.lockWaits += 1 }
                state.failed(turn.source, "\(error)", isPassing: error.remedy == .retry, at: call.now)
            }
            perform(state.release(at: databaseClock.now))
        }
        return hasAny
    }

    /// - Parameter most: 1 or more.
    private mutating func claim(
        _ turn: SendState.Turn, most: Int, _ call: Call, on connection: inout Connection
    ) throws(DatabaseError) -> Outbox.Claim {
        guard let campaign = turn.source.campaign else {
            return try call.outbox.claim(
                turn.topic, most: min(most, Self.mostPerClaim), since: state.claimsFrom(turn, at: call.now),
                backgroundPerHour: call.backgroundPerHour, on: &connection)
        }
        if contents[campaign] == nil {
            contents[campaign] = try call.outbox.content(of: campaign, in: turn.topic, on: &connection)
        }
        guard let content = contents[campaign] else { return Outbox.Claim() }
        return try call.outbox.claim(
            campaign: campaign, content, most: most, backgroundPerHour: call.backgroundPerHour, on: &connection)
    }

    /// Looks for campaigns, and addresses their audience further. An audience that takes long is left to `AddressingWorker`.
    private mutating func lookForCampaigns(
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
        try address(state.toAddress(at: now), at: now, outbox, on: &connection)
    }

    /// Addresses a part of the audience of each of these campaigns, as far as time allows.
    private mutating func address(
        _ waiting: [SendState.Source], at now: ContinuousClock.Instant, _ outbox: Outbox,
        on connection: inout Connection
    ) throws(DatabaseError) {
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
}
