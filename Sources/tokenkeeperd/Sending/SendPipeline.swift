internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// A credential with its client, which has a thread of its own.
struct CredentialAtWork: Sendable {
    let credential: LoadedCredential
    let client: PushClient
}

/// What the sending has in hand, across lost connections to the database: claimed requests, and endings that are not written down yet.
struct SendPipeline {
    private let senders: [CredentialAtWork]
    /// The most requests in hand of a credential and environment.
    private let most: Int
    private var hands: [SendingHealth.Line: RequestsInFlight] = [:]
    private var health = SendingHealth()
    private var topics = DueTopics()
    private var unwritten: [RequestEnding] = []
    private var pauses: [(scope: Outbox.TopicScope, reason: String)] = []
    private var lastTrouble: [SendingHealth.Line: String] = [:]
    var summary: SendSummary

    /// Until when requests for a token wait because of a 410 or the like.
    private var resting: [TokenAddress: ContinuousClock.Instant] = [:]
    private var restingLookedAt = ContinuousClock.now

    /// The topics of which claims fail for their own sake, until when they are left alone.
    private var stuck: [Outbox.TopicScope: (error: DatabaseError, until: ContinuousClock.Instant)] = [:]

    /// They are tried again after so long.
    private static let stuckFor: Duration = .seconds(30)

    /// After a 410 that is so long: the ledger will have learned of it by then.
    private static let untilLearned: Duration = .seconds(2)

    /// The most requests of one claim, and of one transaction that writes endings down.
    static let batch = 1000

    /// - Parameter most: How many requests a credential may have in hand for an environment.
    init(_ senders: [CredentialAtWork], most: Int, summary: SendSummary) {
        self.senders = senders
        self.most = most
        self.summary = summary
    }

    var isEmpty: Bool { hands.values.allSatisfy(\.isEmpty) && unwritten.isEmpty && pauses.isEmpty }

    /// Topics of which nothing can be sent, in words: no credential is for them, or the database cannot claim of them.
    var stuckTopics: [String] {
        topics.uncovered.prefix(20).map {
            "no credential is configured for \($0.topic) (\($0.environment)): its requests wait"
        }
            + stuck.sorted { $0.key.topic < $1.key.topic }.prefix(20).map {
                "requests of \($0.key.topic) (\($0.key.environment)) cannot be claimed, and wait: \($0.value.error)"
            }
    }

    /// What keeps requests waiting, in words.
    var troubles: [String] {
        stuckTopics
            + health.leftInPeace(at: .now).map {
                "APNs is troubled or cannot be reached (\($0.credential), \($0.environment)), and requests wait: \(lastTrouble[$0] ?? "")"
            }
    }

    /// Holds what is in hand against what the database says is: a COMMIT whose answer was lost may have claimed or finished
    /// something, and another daemon may have taken over.
    mutating func reconcile(_ outbox: Outbox, on connection: inout Connection) throws(DatabaseError) {
        let claimed = try outbox.claimed(on: &connection)
        let known = hands.values.reduce(into: Set(unwritten.map(\.number))) { $0.formUnion($1.numbers) }
        unwritten += claimed.subtracting(known).map { RequestEnding(number: $0, fate: .returned(nil)) }
        for line in hands.keys { hands[line]?.keep(only: claimed) }
    }

    /// Takes in what the clients have come to, and writes it down. What is in the way of that passes, and it is tried again.
    ///
    /// - Returns: Whether anything was written down.
    mutating func settle(
        by policy: RetryPolicy, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        for sender in senders {
            var next: [PushRequest] = []
            for outcome in sender.client.collect() { take(outcome, of: sender, by: policy, into: &next) }
            if !next.isEmpty { sender.client.submit(next) }
        }
        if unwritten.isEmpty && pauses.isEmpty { return false }
        do throws(DatabaseError) {
            while let pauseTopic = pauses.first {
                if try outbox.pauseTopic(pauseTopic.scope, reason: pauseTopic.reason, on: &connection) {
                    summary.paused(pauseTopic.scope, pauseTopic.reason)
                }
                pauses.removeFirst()
            }
            while !unwritten.isEmpty {
                let endings = Array(unwritten.prefix(Self.batch))
                try outbox.finish(endings, on: &connection)
                for ending in endings { summary.add(ending) }
                unwritten.removeFirst(endings.count)
            }
        } catch {
            // Somebody has locked one of them: an open transaction that forgets or deletes.
            if error.remedy != .retry { throw error }
            return false
        }
        return true
    }

    private mutating func take(
        _ outcome: PushOutcome, of sender: CredentialAtWork, by policy: RetryPolicy, into next: inout [PushRequest]
    ) {
        let address = outcome.request.address
        let scope = Outbox.TopicScope(environment: address.environment.rawValue, topic: address.topic.name)
        let line = SendingHealth.Line(credential: sender.credential.settings.name, environment: scope.environment)
        guard let claimed = hands[line]?.underWay(address) else { return }
        let step = policy.step(
            after: outcome.end, of: claimed.request, attempts: claimed.attempts, firstSentAt: claimed.firstSentAt,
            now: .now)
        var answer: RequestEnding.Answer?
        switch (outcome.end, step.blame) {
        // It is not from APNs, so it says nothing of the token: as a result it would make the token suspect.
        case (.answered, .foreign): break
        case (.answered(let known), _):
            answer = RequestEnding.Answer(status: known.status, body: known.body, apnsID: known.apnsID)
        default: break
        }
        unwritten.append(RequestEnding(number: claimed.number, fate: step.fate, answer: answer, sentAt: outcome.sentAt))
        if let words = step.fate.error { lastTrouble[line] = words }
        switch health.note(step, of: scope, by: line.credential, at: .now) {
        case .nothing: break
        case .pauseTopic(let reason):
            topics.forget(scope)
            if !pauses.contains(where: { $0.scope == scope }) { pauses.append((scope, reason)) }
        case .leaveInPeace(let pause): summary.leftInPeace(line, for: pause, because: lastTrouble[line])
        }
        let pause: Duration?
        switch (step.fate, step.blame) {
        case (.answered, .token): pause = Self.untilLearned
        case (.answered, _), (.failed, _):
            if let request = hands[line]?.goOn(address) { next.append(request) }
            return
        case (.later(let until, _), _), (.interrupted(let until, _), _): pause = until
        case (.returned(let until), _): pause = until
        }
        if step.fate == .answered, let pause { resting[address] = .now + pause }
        unwritten +=
            hands[line]?.giveBack(address).map { RequestEnding(number: $0.number, fate: .returned(pause)) } ?? []
    }

    /// What came of a claim.
    enum Claim {
        case some
        /// Something is due, and none of it is to be sent now.
        case dueOnly
        case none
    }

    /// Claims what is due, the topics in turn, and has it sent.
    mutating func claim(
        backgroundPerHour: Int, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Claim {
        // What is answered is to be written down first.
        if unwritten.count > 4 * Self.batch { return .none }
        let now = ContinuousClock.now
        if restingLookedAt.duration(to: now) > .seconds(1) {
            restingLookedAt = now
            resting = resting.filter { $0.value > now }
        }
        let due = try topics.look(outbox, on: &connection) { [senders] in Self.sender(for: $0, among: senders) != nil }
        let open = due.compactMap {
            scope -> (scope: Outbox.TopicScope, sender: CredentialAtWork?, line: SendingHealth.Line)? in
            let sender = Self.sender(for: scope, among: senders)
            let line = SendingHealth.Line(
                credential: sender?.credential.settings.name ?? "", environment: scope.environment)
            // Not for a few: a claim costs about the same as for many.
            let hasRoom = most - (hands[line]?.count ?? 0) >= max(most / 4, 1)
            let isStuck = stuck[scope].map { now < $0.until } ?? false
            return hasRoom && !isStuck && !health.isLeftInPeace(line, at: now) ? (scope, sender, line) : nil
        }
        let turns = Dictionary(grouping: open, by: \.line).mapValues(\.count)
        var result = open.isEmpty ? Claim.none : .dueOnly
        for (scope, sender, line) in open {
            let room = max((most - (hands[line]?.count ?? 0)) / (turns[line] ?? 1), 1)
            let claim: Outbox.Claim
            do throws(DatabaseError) {
                claim = try outbox.claim(
                    scope, most: min(room, Self.batch), since: topics.since(scope, at: now),
                    backgroundPerHour: backgroundPerHour, on: &connection)
                stuck[scope] = nil
            } catch {
                // Something among its own requests: the other topics go on.
                guard [.fixData, .retry].contains(error.remedy) else { throw error }
                stuck[scope] = (error, now + Self.stuckFor)
                continue
            }
            topics.claimed(scope, until: claim.dueAt, at: now)
            summary.add(claim)
            if claim.dueAt != nil { result = .some }
            var requests = claim.requests
            if !resting.isEmpty {
                unwritten += requests.compactMap { request in
                    resting[request.request.address].map {
                        RequestEnding(number: request.number, fate: .returned(now.duration(to: $0)))
                    }
                }
                requests.removeAll { resting[$0.request.address] != nil }
            }
            if requests.isEmpty { continue }
            guard let sender else { preconditionFailure("claimed without a credential: \(scope)") }
            sender.client.submit(hands[line, default: RequestsInFlight()].take(requests))
        }
        return result
    }

    /// Nil where no credential is for it.
    private static func sender(for scope: Outbox.TopicScope, among senders: [CredentialAtWork]) -> CredentialAtWork? {
        CredentialSettings.best(of: senders, for: scope) { $0.credential.settings }
    }
}
