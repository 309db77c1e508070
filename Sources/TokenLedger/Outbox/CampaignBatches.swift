public import TokenModel

/// The campaigns, as a sending daemon uses them. PostgreSQL works by the batch: a campaign's audience is addressed in batches, a
/// daemon claims whole batches, and what became of their requests is appended in sets.
extension Outbox {
    /// A campaign that is running or about to begin, in a topic that is not paused.
    public struct DueCampaign: Hashable, Sendable {
        /// Its `campaign_id`.
        public var id: Int64
        public var topic: TopicScope
        /// Whether there are batches to claim.
        public var hasBatches: Bool
        /// Whether a part of its audience is not addressed yet.
        public var needsAddressing: Bool
        /// How long until its rate allows the next claim; zero if it may be claimed from now.
        public var dueIn: Duration

        public init(
            id: Int64, topic: TopicScope, hasBatches: Bool = true, needsAddressing: Bool = false,
            dueIn: Duration = .zero
        ) {
            self.id = id
            self.topic = topic
            self.hasBatches = hasBatches
            self.needsAddressing = needsAddressing
            self.dueIn = dueIn
        }
    }

    /// What all requests of a campaign have in common. It never changes.
    public struct CampaignContent: Hashable, Sendable {
        var environment: Environment
        var topic: Topic
        var payload: [UInt8]
        var pushType: PushType
        var priority: Int?
        var expiration: Int64?
        var collapseID: String?
    }

    /// The most requests of a batch.
    public static let batch = 500

    /// A claim for this many requests or more gets at least one batch, whatever its size.
    public static let partOfBatch = batch / 4

    /// What a look for campaigns has found.
    public struct CampaignLook: Sendable {
        public var due: [DueCampaign] = []
        /// How many requests the look has ended as failed, by topic: their campaigns have expired, and they were never sent.
        public var expired: [TopicScope: Int] = [:]
    }

    /// Looks for campaigns.
    ///
    /// - Parameter ending: Whether to note which of them have ended.
    public func campaignsDue(
        ending: Bool = false, on connection: inout Connection
    ) throws(DatabaseError) -> CampaignLook {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            var look = CampaignLook()
            if ending {
                for (topic, requests) in try connection.query(
                    "SELECT e.environment, e.topic, e.expired FROM tokenkeeper.end_campaigns() AS e"
                ).decode({ row throws(DatabaseError) in
                    (TopicScope(environment: try row.read(), topic: try row.read()), try row.read(Int.self))
                }) { look.expired[topic, default: 0] += requests }
            }
            look.due = try connection.query(
                """
                SELECT c.campaign_id, c.environment, c.topic, c.has_batches, c.needs_addressing,
                       greatest(extract(epoch FROM c.due_at - clock_timestamp()) * 1000000, 0)::bigint
                FROM tokenkeeper.campaigns_due() AS c
                """
            ).decode { row throws(DatabaseError) in
                DueCampaign(
                    id: try row.read(), topic: TopicScope(environment: try row.read(), topic: try row.read()),
                    hasBatches: try row.read(), needsAddressing: try row.read(),
                    dueIn: .microseconds(try row.read(Int64?.self) ?? 0))
            }
            return look
        }
    }

    /// - Returns: Nil if the campaign no longer exists.
    public func content(
        of campaign: Int64, in topic: TopicScope, on connection: inout Connection
    ) throws(DatabaseError) -> CampaignContent? {
        try connection.query(
            """
            SELECT c.payload, c.push_type, c.priority, c.expiration, c.collapse_id
            FROM tokenkeeper.campaign_content($1) AS c WHERE c.payload IS NOT NULL
            """, [.int8(campaign)]
        ).first { row throws(DatabaseError) in
            let payload = try row.read(String.self)
            let pushType = PushType(rawValue: try row.read())
            guard let environment = Environment(rawValue: topic.environment), let name = Topic(topic.topic),
                let pushType
            else {
                throw DatabaseError(.unexpectedRow, "campaign \(campaign) has a content that its own checks refuse")
            }
            return CampaignContent(
                environment: environment, topic: name, payload: compactJSON(payload), pushType: pushType,
                priority: try row.read(), expiration: try row.read(), collapseID: try row.read())
        }
    }

    /// How to look for the audience of a campaign.
    public enum AudienceSearch: Hashable, Sendable {
        /// Gives up soon: on a connection that also claims requests and writes their endings.
        case quick
        /// Takes up to so long. Neither `forget` nor a pause of the campaign waits for it.
        case patient(Duration)
        /// Reads the ledger in ranges of the primary key, whatever the planner expects. For an audience that is not found in a minute.
        case inRanges
    }

    /// The most time of a quick search, and its longest wait for a lock.
    private static let quick: (statement: Duration, lock: Duration) = (.milliseconds(300), .milliseconds(20))

    /// Addresses a part of a campaign's audience, until `ahead` requests wait unclaimed: appends batches, in one bounded transaction.
    ///
    /// - Parameter stop: When this is rung, the search is cancelled.
    /// - Returns: The number of requests that were added, which may be zero although there are more tokens. Nil if there was nothing to do.
    /// - Throws: 57014 if the search takes too long.
    @discardableResult
    public func address(
        _ campaign: Int64, ahead: Int, by search: AudienceSearch = .quick, cancelWhen stop: Wakeup? = nil,
        on connection: inout Connection
    ) throws(DatabaseError) -> Int? {
        // Not durable: what is lost in a crash of the server was not claimed, because a claim is durable.
        var transaction = self.transaction
        switch search {
        case .quick:
            transaction.statementTimeout = Self.quick.statement
            transaction.lockTimeout = min(lockTimeout, Self.quick.lock)
        case .patient(let time): transaction.statementTimeout = time
        case .inRanges: break
        }
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.address_campaign($1, $2, $3, $4)",
                [
                    .int8(campaign), .int4(Int32(clamping: ahead)), .bool(search != .quick),
                    .bool(search == .inRanges),
                ], cancelWhen: stop
            ).value()
        }
    }

    /// Claims whole batches of a campaign, and asks the gate in the same statement.
    ///
    /// - Parameter most: The most requests. A single batch may have up to four times as many.
    public func claim(
        campaign: Int64, _ content: CampaignContent, most: Int, backgroundPerHour: Int, on connection: inout Connection
    ) throws(DatabaseError) -> Claim {
        let now = Instant.now
        let claims = try claim(on: &connection) { connection throws(DatabaseError) in
            let rows = try connection.query(
                "SELECT c.outcome, c.number, c.token_key, c.send_in FROM tokenkeeper.claim_campaign($1, $2, $3, $4) AS c",
                [
                    .int8(campaign), .text(daemonID), .int4(Int32(clamping: most)),
                    .int4(Int32(clamping: backgroundPerHour)),
                ]
            )
            let received = ContinuousClock.now
            let claimed = try rows.decode { row throws(DatabaseError) -> (ClaimedRow.Outcome, ClaimedRequest?) in
                let outcome = try row.read(ClaimedRow.Outcome.self)
                let number = try row.read(Int64.self)
                let token = try row.read(DeviceToken?.self)
                let sendIn = try row.read(Int64?.self)
                guard outcome == .claimed, let token else { return (outcome, nil) }
                let request = try content.request(
                    number, to: token, at: now, sendAt: sendIn.map { received + .microseconds($0) })
                return (outcome, request)
            }
            var claim = Claim()
            claim.requests = claimed.compactMap(\.1)
            claim.suppressed = claimed.count { $0.0 == .suppressed }
            if !claimed.isEmpty { claim.dueAt = now }
            return [claim]
        }
        return claims[0]
    }
}

extension Outbox.CampaignContent {
    fileprivate func request(
        _ number: Int64, to token: DeviceToken, at now: Instant, sendAt: ContinuousClock.Instant?
    ) throws(DatabaseError) -> ClaimedRequest {
        guard let numbered = CampaignRequest(number: number) else {
            throw DatabaseError(.unexpectedRow, "claim_campaign claimed request \(number), expected a negative number")
        }
        return ClaimedRequest(
            number: number,
            request: PushRequest(
                address: TokenAddress(environment: environment, topic: topic, token: token), payload: payload,
                pushType: pushType, priority: priority,
                expiration: expiration ?? pushType.lifetime.map { now.microseconds / 1_000_000 + $0 },
                collapseID: collapseID, id: numbered.apnsID),
            firstSentAt: now, sendAt: sendAt)
    }
}

extension DeviceToken: ColumnDecodable {
    /// A `bytea`.
    package init(column: borrowing Row) throws(DatabaseError) {
        guard column.type == 17, column.isBinary else { throw column.mismatch("is not a binary bytea") }
        guard let token = DeviceToken(bytes: try unsafe column.bytes { unsafe Array($0) }) else {
            throw column.mismatch("is not a device token")
        }
        self = token
    }
}
