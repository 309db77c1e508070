internal import APNsFeedback
internal import TokenLedger

/// What outcomes in a row say of a topic, a server and a credential: when to stop, and when to leave one in peace. Pure.
struct SendingHealth {
    /// So many messages of a topic that APNs calls faulty, one after the other, are a fault of who makes them.
    static let messagesInARow = 20
    /// So many troubled answers of a server, one after the other, are trouble for all.
    static let troublesInARow = 20
    /// How long a server is left in peace then: this, doubled each time up to the longest.
    static let rest: (first: Duration, longest: Duration) = (.seconds(15), .seconds(15 * 60))

    private var faults: [Outbox.Lane: Int] = [:]
    private var servers: [String: (troubles: Int, rest: Duration, until: ContinuousClock.Instant?)] = [:]

    /// What is to be done about the topic or the server.
    enum Measure: Equatable {
        case nothing
        /// Stop the topic, for the reason told.
        case halt(String)
        /// The server of the environment is left in peace for so long.
        case leaveInPeace(Duration)
    }

    mutating func note(
        _ step: SendPolicy.Step, of lane: Outbox.Lane, at now: ContinuousClock.Instant
    ) -> Measure {
        switch step.blame {
        case .message(let words):
            faults[lane, default: 0] += 1
            if faults[lane, default: 0] < Self.messagesInARow { return .nothing }
            faults[lane] = nil
            return .halt("\(Self.messagesInARow) messages in a row were refused, the last: \(words)")
        case .topic(let words): return .halt(words)
        case .credential(let pause): return leave(lane.environment, for: pause, at: now)
        case .server:
            // Those that were under way when it began say nothing new.
            if isLeftInPeace(lane.environment, at: now) { return .nothing }
            var server = servers[lane.environment] ?? (0, Self.rest.first, nil)
            server.troubles += 1
            servers[lane.environment] = server
            if server.troubles < Self.troublesInARow { return .nothing }
            servers[lane.environment]?.troubles = 0
            servers[lane.environment]?.rest = min(server.rest * 2, Self.rest.longest)
            return leave(lane.environment, for: server.rest, at: now)
        case .nobody, .token:
            guard step.fate == .answered else { return .nothing }
            faults[lane] = nil
            servers[lane.environment]?.troubles = 0
            // An answer that was under way when it began says nothing of the rest.
            if !isLeftInPeace(lane.environment, at: now) { servers[lane.environment] = nil }
            return .nothing
        }
    }

    private mutating func leave(
        _ environment: String, for pause: Duration, at now: ContinuousClock.Instant
    ) -> Measure {
        if isLeftInPeace(environment, at: now) { return .nothing }
        servers[environment, default: (0, Self.rest.first, nil)].until = now + pause
        return .leaveInPeace(pause)
    }

    func isLeftInPeace(_ environment: String, at now: ContinuousClock.Instant) -> Bool {
        servers[environment]?.until.map { now < $0 } ?? false
    }
}
