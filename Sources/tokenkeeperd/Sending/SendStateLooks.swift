internal import TokenLedger
internal import TokenModel

/// Where requests wait: topics and campaigns.
extension SendState {
    /// Whether so many endings are unwritten that they must be written before anything is claimed.
    var isBehind: Bool { unwritten.isBacklog }

    /// Whether the pipeline is to look for topics now, page by page.
    mutating func looksForTopics(at now: ContinuousClock.Instant) -> Bool {
        // While a campaign is sent, there is a turn every few milliseconds.
        if !campaigns.isEmpty, topics.isQuiet(at: now) { return false }
        return topics.beginsLook(at: now)
    }

    /// Where the next page of topics begins; nil for the first.
    var topicCursor: TopicScope? { topics.cursor }

    /// - Returns: Whether the look needs another page.
    mutating func add(_ page: Outbox.Scopes, at now: ContinuousClock.Instant) -> Bool {
        topics.add(page) { [credential] in credential($0) != nil }
        if topics.isLookComplete {
            blocked.keep(only: Set(topics.waiting.map { Source(topic: $0) }).union(campaigns.sources))
            // What nothing waits for keeps nobody waiting.
            let waiting = topics.waiting.union(campaigns.topics).union(paced.sources.lazy.map(\.source.topic))
            let busy = Set(
                waiting.compactMap { topic in
                    credential(topic).map { CredentialScope(credential: $0, environment: topic.environment) }
                } + servers.filter { !$0.value.requests.isEmpty }.keys)
            servers = servers.filter { busy.contains($0.key) }
            evidence.keep(at: now) { [servers] subject in
                switch subject {
                case .server(let scope): busy.contains(scope)
                case .topic(let topic): waiting.contains(topic) || servers.values.contains { $0.requests.holds(topic) }
                }
            }
        }
        return topics.needsAnotherPage
    }

    /// Whether the pipeline is to look for campaigns now.
    mutating func looksForCampaigns(at now: ContinuousClock.Instant) -> Bool { campaigns.beginsLook(at: now) }

    /// Whether the look is also to note which campaigns have ended.
    mutating func endsCampaigns(at now: ContinuousClock.Instant) -> Bool { campaigns.beginsEnding(at: now) }

    mutating func take(_ found: [Outbox.DueCampaign], at now: ContinuousClock.Instant) {
        campaigns.take(found, at: now) { [credential] in credential($0) != nil }
    }

    /// Counts requests of campaigns that have expired. Those of topics without a credential here belong to no metric.
    mutating func count(expired: [TopicScope: Int]) {
        for (topic, requests) in expired {
            guard let credential = credential(topic) else { continue }
            counts.add(expired: requests, in: CredentialScope(credential: credential, environment: topic.environment))
        }
    }

    /// The campaigns whose audience is to be addressed further, in the order of their numbers.
    ///
    /// - Parameter areSlow: Whether those are meant whose audience takes long to find, or the others.
    func toAddress(areSlow: Bool = false, at now: ContinuousClock.Instant) -> [Source] {
        campaigns.toAddress(areSlow: areSlow).filter { !blocked.isBlocked($0, at: now) }
    }

    /// The campaigns whose audience takes long to find, including those that wait after a failure.
    var slowAudiences: [Source] { campaigns.toAddress(areSlow: true) }

    /// The audience of a campaign takes long to find.
    mutating func isSlow(_ campaign: Int64) { campaigns.isSlow(campaign) }

    /// Batches were appended to a campaign.
    mutating func addressed(_ campaign: Int64) { campaigns.addressed(campaign) }
}
