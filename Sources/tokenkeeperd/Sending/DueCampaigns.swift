internal import TokenLedger
internal import TokenModel

/// The campaigns that can be claimed from, in the order of their turns. Pure.
struct DueCampaigns {
    private struct Known {
        var campaign: Outbox.DueCampaign
        /// When its rate allows the next claim.
        var dueAt: ContinuousClock.Instant
    }

    private var known: [Known] = []
    /// Campaigns that no credential covers.
    private(set) var uncovered: [Outbox.DueCampaign] = []
    /// Campaigns whose audience takes long to find.
    private var slow: Set<Int64> = []
    private var lookedAt: ContinuousClock.Instant?
    private var looksSoon = false
    private var endedAt: ContinuousClock.Instant?
    private var endsSoon = false

    /// How often to look for campaigns.
    static let lookEvery: Duration = .milliseconds(50)
    /// How often to look for them while there is none: each look costs this process and PostgreSQL together half a millisecond.
    private static let lookIdly: Duration = .milliseconds(200)
    /// How often to note which campaigns have ended.
    private static let endEvery: Duration = .seconds(1)
    /// How soon to look again after a claim that found nothing.
    private static let soon: Duration = .milliseconds(10)

    var isEmpty: Bool { known.isEmpty }

    /// How long until something is to be done for a campaign.
    func pause(at now: ContinuousClock.Instant) -> Duration {
        let looks = lookedAt.map { now.duration(to: $0) + untilLook } ?? .zero
        // What is due already waits for room or for the next look.
        let dues = known.lazy.map { now.duration(to: $0.dueAt) }.filter { $0 > .zero }
        return max(dues.reduce(looks, min), .zero)
    }

    /// The time between the last look and the next.
    private var untilLook: Duration {
        if looksSoon { return Self.soon }
        return known.isEmpty && uncovered.isEmpty ? Self.lookIdly : Self.lookEvery
    }

    mutating func beginsLook(at now: ContinuousClock.Instant) -> Bool {
        if let lookedAt, lookedAt.duration(to: now) < untilLook { return false }
        (lookedAt, looksSoon) = (now, false)
        return true
    }

    /// Whether to note now which campaigns have ended.
    mutating func beginsEnding(at now: ContinuousClock.Instant) -> Bool {
        if !endsSoon, let endedAt, endedAt.duration(to: now) < Self.endEvery { return false }
        (endedAt, endsSoon) = (now, false)
        return true
    }

    /// The last request that this daemon had has ended: it may be the last one of a campaign.
    mutating func mayHaveEnded() { endsSoon = true }

    /// Takes what a look has found. A new campaign has its turn before the others.
    mutating func take(
        _ found: [Outbox.DueCampaign], at now: ContinuousClock.Instant, covers: (TopicScope) -> Bool
    ) {
        uncovered = found.filter { !covers($0.topic) }
        let places = Dictionary(uniqueKeysWithValues: known.enumerated().map { ($1.campaign.id, $0) })
        let covered = found.filter { covers($0.topic) }.sorted { places[$0.id] ?? -1 < places[$1.id] ?? -1 }
        known = covered.map { Known(campaign: $0, dueAt: now + $0.dueIn) }
        slow.formIntersection(found.lazy.filter(\.needsAddressing).map(\.id))
    }

    /// The campaigns whose audience is to be addressed further, in the order of their numbers.
    ///
    /// - Parameter areSlow: Whether those are meant whose audience takes long to find, or the others.
    func toAddress(areSlow: Bool) -> [SendState.Source] {
        known.lazy.filter { $0.campaign.needsAddressing && slow.contains($0.campaign.id) == areSlow }
            .sorted { $0.campaign.id < $1.campaign.id }
            .map { SendState.Source(topic: $0.campaign.topic, campaign: $0.campaign.id) }
    }

    /// The audience of a campaign takes long to find.
    mutating func isSlow(_ id: Int64) { slow.insert(id) }

    /// The campaigns that can be claimed from now.
    func claimable(at now: ContinuousClock.Instant) -> [Outbox.DueCampaign] {
        known.filter { $0.campaign.hasBatches && $0.dueAt <= now }.map(\.campaign)
    }

    /// The topics with campaigns to claim from, now or later.
    var topics: Set<TopicScope> { Set(known.map(\.campaign.topic)) }

    var sources: Set<SendState.Source> {
        Set(known.map { SendState.Source(topic: $0.campaign.topic, campaign: $0.campaign.id) })
    }

    /// Batches were appended to a campaign.
    mutating func addressed(_ id: Int64) {
        if let place = place(of: id) { known[place].campaign.hasBatches = true }
    }

    /// A campaign has had its turn, and the others come before its next one.
    ///
    /// - Parameters:
    ///   - some: Whether it had any request. If not, its rate may not allow one yet, or another daemon was faster.
    ///   - lastSendAt: When its rate lets the last of them be sent.
    mutating func claimed(_ id: Int64, some: Bool, lastSendAt: ContinuousClock.Instant?) {
        guard let place = place(of: id) else { return }
        var had = known.remove(at: place)
        if !some {
            had.campaign.hasBatches = false
            looksSoon = true
        }
        if let lastSendAt { had.dueAt = lastSendAt - Outbox.pacedAhead }
        known.append(had)
    }

    /// Claims nothing in the topic until another look.
    mutating func forget(_ topic: TopicScope) {
        known.removeAll { $0.campaign.topic == topic }
    }

    private func place(of id: Int64) -> Int? { known.firstIndex { $0.campaign.id == id } }
}
