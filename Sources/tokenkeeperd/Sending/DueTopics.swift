internal import TokenLedger
internal import TokenModel

/// The topics that have something due, and how far in each has been claimed: neither is asked of the database in every turn, because
/// what has been claimed lies dead at the front of the index until PostgreSQL clears it away.
struct DueTopics {
    /// Those that have something due, and a credential; or are no topics, so that their requests are to be failed.
    private var due: [Outbox.TopicScope] = []
    /// Those that no credential is for.
    private(set) var uncovered: [Outbox.TopicScope] = []
    /// The same, of the round that is not through yet.
    private var uncoveredSoFar: [Outbox.TopicScope] = []
    private var lookedAt: ContinuousClock.Instant?
    /// Where the next look begins: there may be thousands, of which it takes a part.
    private var cursor: Outbox.TopicScope?
    private var claimedUntil: [Outbox.TopicScope: (dueAt: Instant, since: ContinuousClock.Instant)] = [:]

    /// So often the topics are looked for while there are some.
    private static let lookEvery: Duration = .milliseconds(500)

    /// So often a topic is claimed from its front: what was committed late, or came back, lies there.
    private static let fromFrontEvery: Duration = .seconds(5)

    /// The topics to claim of, as far as they are known. Those that nobody covers, however many, keep none of the others back.
    mutating func look(
        _ outbox: Outbox, on connection: inout Connection, covers: (Outbox.TopicScope) -> Bool
    ) throws(DatabaseError) -> [Outbox.TopicScope] {
        if !due.isEmpty, let lookedAt, lookedAt.duration(to: .now) < Self.lookEvery { return due }
        lookedAt = .now
        repeat {
            let part = try outbox.scopes(after: cursor, on: &connection)
            cursor = part.last
            for scope in part.due {
                let canBeSent = Environment(rawValue: scope.environment) != nil && !scope.topic.isEmpty
                if canBeSent && !covers(scope) {
                    uncoveredSoFar.append(scope)
                } else if !due.contains(scope) {
                    due.append(scope)
                }
            }
            if cursor == nil {
                uncovered = uncoveredSoFar
                uncoveredSoFar = []
            }
        } while due.isEmpty && cursor != nil
        return due
    }

    /// From where on to claim.
    mutating func since(_ scope: Outbox.TopicScope, at now: ContinuousClock.Instant) -> Instant {
        guard let known = claimedUntil[scope] else { return .distantPast }
        if known.since.duration(to: now) < Self.fromFrontEvery { return known.dueAt }
        claimedUntil[scope] = nil
        return .distantPast
    }

    /// - Parameter dueAt: When the last one that was looked at was due; nil when nothing was.
    mutating func claimed(_ scope: Outbox.TopicScope, until dueAt: Instant?, at now: ContinuousClock.Instant) {
        guard let dueAt else { return forget(scope) }
        claimedUntil[scope] = (dueAt, claimedUntil[scope]?.since ?? now)
    }

    /// Nothing is to be claimed of it before it has been looked for again.
    mutating func forget(_ scope: Outbox.TopicScope) {
        due.removeAll { $0 == scope }
        claimedUntil[scope] = nil
    }
}
