internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What outcomes in a row say of a topic, a server and a credential: when to stop, and when to leave one in peace. Pure.
struct SendingHealth {
    /// So many messages of a topic that APNs calls faulty, one after the other, are a fault of who makes them.
    static let messagesInARow = 20
    /// So many responses of a topic that are not from APNs, one after the other, pause it.
    static let foreignInARow = 5
    /// So many troubled answers of a server, one after the other, are trouble for all.
    static let troublesInARow = 20
    /// How long a server is left in peace then: this, doubled each time up to the longest.
    static let rest: (first: Duration, longest: Duration) = (.seconds(15), .seconds(15 * 60))

    /// A credential's way to a server.
    struct Line: Hashable {
        var credential: String
        var environment: String
    }

    private var faults: [Outbox.TopicScope: Int] = [:]
    private var foreign: [Outbox.TopicScope: Int] = [:]
    private var servers: [Line: (troubles: Int, rest: Duration, until: ContinuousClock.Instant?)] = [:]
    /// Where APNs asked for a pause of the credential, which holds for all that it sends.
    private var pauses: [Line: ContinuousClock.Instant] = [:]

    /// What is to be done about the topic or the server.
    enum Measure: Equatable {
        case nothing
        /// Stop the topic, for the reason told.
        case pauseTopic(String)
        /// The server of the environment is left in peace for so long.
        case leaveInPeace(Duration)
    }

    mutating func note(
        _ step: RetryPolicy.Step, of scope: Outbox.TopicScope, by credential: String, at now: ContinuousClock.Instant
    ) -> Measure {
        let line = Line(credential: credential, environment: scope.environment)
        switch step.blame {
        case .message(let words):
            faults[scope, default: 0] += 1
            if faults[scope, default: 0] < Self.messagesInARow { return .nothing }
            faults[scope] = nil
            return .pauseTopic("\(Self.messagesInARow) messages in a row were refused, the last: \(words)")
        case .topic(let words): return .pauseTopic(words)
        case .foreign(let words):
            foreign[scope, default: 0] += 1
            if foreign[scope, default: 0] < Self.foreignInARow { return .nothing }
            foreign[scope] = nil
            return .pauseTopic(
                "\(Self.foreignInARow) responses in a row are not from APNs, the last: \(words); "
                    + "check send.\(scope.environment)_server and any proxy between the daemon and APNs")
        case .credential(let pause):
            if isLeftInPeace(line, at: now) { return .nothing }
            pauses[line] = now + pause
            return .leaveInPeace(pause)
        case .server:
            // Those that were under way when it began say nothing new.
            if isLeftInPeace(line, at: now) { return .nothing }
            var server = servers[line] ?? (0, Self.rest.first, nil)
            server.troubles += 1
            let pause = server.rest
            if server.troubles >= Self.troublesInARow {
                server = (0, min(pause * 2, Self.rest.longest), now + pause)
            }
            servers[line] = server
            return server.until.map { now < $0 } ?? false ? .leaveInPeace(pause) : .nothing
        case .nobody, .token:
            guard step.fate == .answered else { return .nothing }
            faults[scope] = nil
            foreign[scope] = nil
            // An answer that was under way when it began says nothing of the rest.
            if !isLeftInPeace(line, at: now) { servers[line] = nil }
            return .nothing
        }
    }

    /// Those that are.
    func leftInPeace(at now: ContinuousClock.Instant) -> [Line] {
        Set(servers.keys).union(pauses.keys).filter { isLeftInPeace($0, at: now) }.sorted {
            ($0.credential, $0.environment) < ($1.credential, $1.environment)
        }
    }

    func isLeftInPeace(_ line: Line, at now: ContinuousClock.Instant) -> Bool {
        if let until = servers[line]?.until, now < until { return true }
        return pauses.contains { $0.key.credential == line.credential && now < $0.value }
    }
}
