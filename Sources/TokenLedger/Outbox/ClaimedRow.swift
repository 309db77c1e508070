internal import TokenModel

/// A row of `claim_requests`: what the claim did with one request.
struct ClaimedRow {
    enum Outcome: String, ColumnDecodable {
        case claimed, suppressed, failed, delayed, overtaken
    }

    let outcome: Outcome
    /// Nil if the request was not due.
    let dueAt: Instant?
    /// Nil unless it was claimed.
    let request: ClaimedRequest?

    /// - Parameter now: When the row was read.
    init(_ row: inout Row, of scope: TopicScope, at now: ContinuousClock.Instant) throws(DatabaseError) {
        outcome = try row.read()
        dueAt = try row.read()
        let number = try row.read(Int64.self)
        let token = try row.read(String?.self).flatMap(DeviceToken.init(hex:))
        let payload = try row.read(String?.self)
        let pushType = try row.read(String?.self).flatMap(PushType.init(rawValue:))
        let priority = try row.read(Int?.self)
        let expiration = try row.read(Int64?.self)
        let collapseID = try row.read(String?.self)
        let id = try row.read(String?.self)
        let attempts = try row.read(Int?.self)
        let firstSentAt = try row.read(Instant?.self)
        let refusals = try row.read(Int?.self)
        let othersAccepted = try row.read(Bool?.self)
        let sendIn = try row.read(Int64?.self)
        guard outcome == .claimed else {
            request = nil
            return
        }
        guard let environment = Environment(rawValue: scope.environment), let topic = Topic(scope.topic), let token,
            let payload, let pushType, let id, let attempts, let firstSentAt
        else {
            throw DatabaseError(.unexpectedRow, "claim_requests claimed request \(number), which its own checks refuse")
        }
        request = ClaimedRequest(
            number: number,
            request: PushRequest(
                address: TokenAddress(environment: environment, topic: topic, token: token),
                payload: compactJSON(payload), pushType: pushType, priority: priority, expiration: expiration,
                collapseID: collapseID, id: id, mayBeRepeated: attempts == 0),
            attempts: attempts, firstSentAt: firstSentAt, refusals: refusals ?? 0,
            othersAccepted: othersAccepted ?? false,
            sendAt: sendIn.map { now + .microseconds($0) })
    }
}

extension Outbox.Claim {
    /// Counts what the claim did with one more request.
    mutating func add(_ row: ClaimedRow) {
        looked += 1
        if let dueAt = row.dueAt { self.dueAt = max(self.dueAt ?? dueAt, dueAt) }
        switch row.outcome {
        case .claimed: if let request = row.request { requests.append(request) }
        case .suppressed, .overtaken: suppressed += 1
        case .failed: failed += 1
        case .delayed: break
        }
    }
}
