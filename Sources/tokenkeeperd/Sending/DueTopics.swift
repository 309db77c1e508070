internal import TokenLedger
internal import TokenModel

/// The topics that have requests due, and how far each has been claimed. Pure.
///
/// Claimed requests leave dead entries at the front of the index until PostgreSQL removes them. So the sender does not search for
/// due topics in every turn, and does not start every claim at the front.
struct DueTopics {
    /// Topics with requests to claim: a credential covers the topic, or the topic is invalid and its requests must fail.
    private(set) var claimable: [TopicScope] = []
    /// Topics that no credential covers, as of the last complete look.
    private(set) var uncovered: [TopicScope] = []
    /// Topics that have requests to claim, now or later, as of the last complete look.
    private(set) var waiting: Set<TopicScope> = []
    /// What the current look has found so far.
    private var uncoveredSoFar: [TopicScope] = []
    private var waitingSoFar: Set<TopicScope> = []
    private var lookedAt: ContinuousClock.Instant?
    /// The last topic of the page that was read last; nil before the first page. There may be thousands of topics.
    private(set) var cursor: TopicScope?
    private var claimedUntil: [TopicScope: (dueAt: Instant, since: ContinuousClock.Instant)] = [:]

    /// How often to look for topics while some are claimable.
    private static let lookEvery: Duration = .milliseconds(500)

    /// How often a claim starts at the front of a topic, where late commits and returned requests are.
    private static let fromFrontEvery: Duration = .seconds(5)

    /// Whether to read pages now, until `needsAnotherPage` is false.
    mutating func beginsLook(at now: ContinuousClock.Instant) -> Bool {
        if !claimable.isEmpty, let lookedAt, lookedAt.duration(to: now) < Self.lookEvery { return false }
        lookedAt = now
        return true
    }

    /// Whether the last look found nothing to claim, a moment ago.
    func isQuiet(at now: ContinuousClock.Instant) -> Bool {
        claimable.isEmpty && isLookComplete && lookedAt.map { $0.duration(to: now) < DueCampaigns.lookEvery } ?? false
    }

    /// Takes the page of topics behind `cursor`.
    mutating func add(_ page: Outbox.Scopes, covers: (TopicScope) -> Bool) {
        cursor = page.last
        waitingSoFar.formUnion(page.waiting)
        for topic in page.due {
            if topic.isValid && !covers(topic) {
                uncoveredSoFar.append(topic)
            } else if !claimable.contains(topic) {
                claimable.append(topic)
            }
        }
        if isLookComplete {
            (uncovered, uncoveredSoFar) = (uncoveredSoFar, [])
            (waiting, waitingSoFar) = (waitingSoFar, [])
        }
    }

    /// Whether the page that was read last was the last one.
    var isLookComplete: Bool { cursor == nil }

    /// A page that has only uncovered topics must not end the look: the next page may have others.
    var needsAnotherPage: Bool { claimable.isEmpty && !isLookComplete }

    /// Where the next claim of a topic begins.
    mutating func claimsFrom(_ topic: TopicScope, at now: ContinuousClock.Instant) -> Instant {
        guard let known = claimedUntil[topic] else { return .distantPast }
        if known.since.duration(to: now) < Self.fromFrontEvery { return known.dueAt }
        claimedUntil[topic] = nil
        return .distantPast
    }

    /// - Parameter dueAt: When the last request that the claim looked at was due; nil when nothing was due.
    mutating func claimed(_ topic: TopicScope, until dueAt: Instant?, at now: ContinuousClock.Instant) {
        guard let dueAt else { return forget(topic) }
        claimedUntil[topic] = (dueAt, claimedUntil[topic]?.since ?? now)
    }

    /// Whether nothing of the topic has been claimed since a look found it.
    func isJustFound(_ topic: TopicScope) -> Bool { claimedUntil[topic] == nil }

    /// Claims nothing of the topic until another look finds it.
    mutating func forget(_ topic: TopicScope) {
        claimable.removeAll { $0 == topic }
        claimedUntil[topic] = nil
    }
}
