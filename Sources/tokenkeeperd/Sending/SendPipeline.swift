internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// A credential with its client, which runs on its own thread.
struct CredentialAtWork: Sendable {
    let credential: LoadedCredential
    let client: PushClient
}

/// Performs what `SendState` decides: submits requests to the clients, claims them from the outbox and writes their endings.
///
/// It lives as long as the process. A lost connection to the database ends a turn and leaves the state as it is.
struct SendPipeline {
    private let senders: [CredentialAtWork]
    private var state: SendState
    var summary: SendSummary

    /// The most requests of one claim.
    private static let mostPerClaim = 1000

    /// - Parameter limit: The most requests that a credential may hold for an environment.
    init(_ senders: [CredentialAtWork], limit: Int, summary: SendSummary) {
        self.senders = senders
        self.summary = summary
        state = SendState(limit: limit) { topic in
            CredentialSettings.best(of: senders, for: topic) { $0.credential.settings }?.credential.settings.name
        }
    }

    var isEmpty: Bool { state.isEmpty }
    var blockedTopics: [String] { state.blockedTopics }
    var problems: [String] { state.problems(at: .now) }

    /// Gives back the requests that this daemon has claimed according to the database, but that the state does not know.
    mutating func reconcile(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        state.reconcile(claimed: try outbox.claimed(on: &connection))
    }

    /// Looks up which of the requests must not be sent any more.
    private mutating func recall(
        _ numbers: [Int64], _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        if numbers.isEmpty { return }
        state.take(try outbox.recalled(among: numbers, on: &connection))
    }

    /// Takes outcomes from the clients, submits the next requests of their tokens, and writes what became of the requests.
    ///
    /// - Returns: Whether it wrote anything. False as well if another session has locked a row: the next turn tries again.
    mutating func finish(
        by policy: RetryPolicy, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        for sender in senders {
            perform(state.take(sender.client.collect(), of: sender.credential.settings.name, by: policy, at: .now))
        }
        // An outcome may have taken a minute: in the meantime, somebody may have paused the topic or forgotten the token.
        try recall(state.next, outbox, on: &connection)
        perform(state.handOver())
        var hasWritten = false
        do throws(DatabaseError) {
            while let write = state.nextWrite {
                try perform(write, outbox, on: &connection)
                state.wrote()
                hasWritten = true
            }
        } catch {
            // An open transaction that runs `forget` or deletes requests holds the lock.
            if error.remedy != .retry { throw error }
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

    /// Claims what is due, the topics in turn, and submits it.
    mutating func claim(
        backgroundPerHour: Int, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Claimed {
        if state.isBehind { return .none }
        let now = ContinuousClock.now
        if state.looksForTopics(at: now) {
            try recall(state.unsent, outbox, on: &connection)
            while state.add(try outbox.scopes(after: state.topicCursor, on: &connection)) {}
        }
        let turns = state.turns(at: now)
        var result = turns.isEmpty ? Claimed.none : .dueOnly
        for turn in turns {
            let claim: Outbox.Claim
            do throws(DatabaseError) {
                claim = try outbox.claim(
                    turn.topic, most: min(state.room(for: turn), Self.mostPerClaim),
                    since: state.claimsFrom(turn, at: now), backgroundPerHour: backgroundPerHour, on: &connection)
            } catch {
                guard [.fixData, .retry].contains(error.remedy) else { throw error }
                state.claimFailed(turn, "\(error)", at: now)
                continue
            }
            if claim.dueAt != nil { result = .some }
            summary.add(claim)
            perform(state.take(claim, of: turn, at: now))
        }
        return result
    }

    private func perform(_ actions: [SendState.Action]) {
        for action in actions {
            switch action {
            case .submit(let requests, let credential):
                senders.first { $0.credential.settings.name == credential }?.client.submit(requests)
            case .logRest(let scope, let pause, let lastError):
                summary.rests(scope, for: pause, lastError: lastError)
            }
        }
    }

    private mutating func perform(
        _ write: UnwrittenEndings.Write, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) {
        switch write {
        case .pause(let topic, let reason):
            if try outbox.pauseTopic(topic, reason: reason, on: &connection) { summary.paused(topic, reason) }
        case .endings(let endings):
            try outbox.finish(endings, on: &connection)
            for ending in endings { summary.add(ending) }
        }
    }
}
