internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What the sending has in hand, across lost connections to the database: claimed requests, and endings that are not written down yet.
struct SendingDesk {
    private let senders: [CredentialAtWork]
    private(set) var inHand = RequestsInHand()
    private var health = SendingHealth()
    private var unwritten: [RequestEnding] = []
    private var halts: [(lane: Outbox.Lane, reason: String)] = []
    var digest: SendDigest

    /// Until when requests for a token wait after its 410: the ledger will have learned of it by then.
    private var dead: [TokenAddress: ContinuousClock.Instant] = [:]
    private static let untilLearned: Duration = .seconds(2)

    /// The most requests of one claim, and of one transaction that writes endings down.
    static let batch = 1000

    init(_ senders: [CredentialAtWork], digest: SendDigest) {
        self.senders = senders
        self.digest = digest
    }

    var isEmpty: Bool { inHand.isEmpty && unwritten.isEmpty && halts.isEmpty }

    /// Takes in what the clients have come to, and writes it down.
    ///
    /// - Returns: Whether there was anything.
    mutating func settle(
        by policy: SendPolicy, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        for sender in senders {
            var next: [PushRequest] = []
            for outcome in sender.client.collect() { take(outcome, by: policy, into: &next) }
            if !next.isEmpty { sender.client.submit(next) }
        }
        let hasWork = !unwritten.isEmpty || !halts.isEmpty
        while let halt = halts.first {
            if try outbox.halt(halt.lane, reason: halt.reason, on: &connection) {
                digest.halted(halt.lane, halt.reason)
            }
            halts.removeFirst()
        }
        while !unwritten.isEmpty {
            let endings = Array(unwritten.prefix(Self.batch))
            try outbox.finish(endings, on: &connection)
            for ending in endings { digest.add(ending) }
            unwritten.removeFirst(endings.count)
        }
        return hasWork
    }

    private mutating func take(_ outcome: PushOutcome, by policy: SendPolicy, into next: inout [PushRequest]) {
        let address = outcome.request.address
        guard let claimed = inHand.underWay(address) else { return }
        let lane = Outbox.Lane(environment: address.environment.rawValue, topic: address.topic.name)
        let step = policy.step(
            after: outcome.end, of: claimed.request, attempts: claimed.attempts, firstSentAt: claimed.firstSentAt,
            now: .now)
        var answer: RequestEnding.Answer?
        if case .answered(let known) = outcome.end {
            answer = RequestEnding.Answer(status: known.status, body: known.body, apnsID: known.apnsID)
        }
        let fate = RequestEnding.Fate(step.fate)
        unwritten.append(RequestEnding(number: claimed.number, fate: fate, answer: answer, sentAt: outcome.sentAt))
        switch health.note(step, of: lane, at: .now) {
        case .nothing: break
        case .halt(let reason):
            if !halts.contains(where: { $0.lane == lane }) { halts.append((lane, reason)) }
        case .leaveInPeace(let pause): digest.leftInPeace(lane.environment, for: pause, after: fate)
        }
        let pause: Duration?
        switch (step.fate, step.blame) {
        case (.answered, .token):
            pause = Self.untilLearned
            dead[address] = .now + Self.untilLearned
        case (.answered, _), (.failed, _):
            if let request = inHand.goOn(address) { next.append(request) }
            return
        case (.later(let until, _), _): pause = until
        case (.returned(let until), _): pause = until
        }
        unwritten += inHand.giveBack(address).map { RequestEnding(number: $0.number, fate: .returned(pause)) }
    }

    /// Claims what is due, the topics in turn, and has it sent.
    ///
    /// - Parameter uncovered: Gets the topics that no credential is for.
    /// - Returns: Whether anything was due that can be sent now.
    mutating func claim(
        most: Int, backgroundPerHour: Int, _ outbox: Outbox, on connection: inout Connection,
        uncovered: inout [Outbox.Lane]
    ) throws(DatabaseError) -> Bool {
        let room = most - inHand.count
        // Not for a few: a claim costs about the same as for many.
        if room < most / 4 { return false }
        let lanes = try outbox.lanes(on: &connection)
        let open = lanes.filter { !health.isLeftInPeace($0.environment, at: .now) }
        uncovered = lanes.filter {
            sender(for: $0) == nil && Environment(rawValue: $0.environment) != nil && !$0.topic.isEmpty
        }
        // What is no environment and no topic needs no credential to be given up.
        let covered = open.filter { !uncovered.contains($0) }
        let now = ContinuousClock.now
        dead = dead.filter { $0.value > now }
        for lane in covered {
            var claimed = try outbox.claim(
                lane, most: min(max(room / covered.count, 1), Self.batch), backgroundPerHour: backgroundPerHour,
                on: &connection)
            if !dead.isEmpty {
                unwritten += claimed.compactMap { claimed in
                    dead[claimed.request.address].map {
                        RequestEnding(number: claimed.number, fate: .returned(now.duration(to: $0)))
                    }
                }
                claimed.removeAll { dead[$0.request.address] != nil }
            }
            if claimed.isEmpty { continue }
            guard let sender = sender(for: lane) else { preconditionFailure("claimed without a credential: \(lane)") }
            sender.client.submit(inHand.take(claimed))
        }
        return !covered.isEmpty
    }

    private func sender(for lane: Outbox.Lane) -> CredentialAtWork? {
        var best: (sender: CredentialAtWork, fit: Int)?
        for sender in senders {
            guard let fit = sender.credential.settings.fit((lane.topic, lane.environment)) else { continue }
            if fit > best?.fit ?? -1 { best = (sender, fit) }
        }
        return best?.sender
    }
}

/// A credential with its client, which has a thread of its own.
struct CredentialAtWork: Sendable {
    let credential: LoadedCredential
    let client: PushClient
}

extension RequestEnding.Fate {
    init(_ fate: SendPolicy.Fate) {
        self =
            switch fate {
            case .answered: .answered
            case .failed(let error): .failed(error)
            case .later(let pause, let words): .later(pause, words)
            case .returned(let pause): .returned(pause)
            }
    }
}
