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
    /// Topics with a rate: when it lets the last claimed request be sent, and when to claim next.
    private var rated: [TopicScope: (lastSendAt: ContinuousClock.Instant, claimAt: ContinuousClock.Instant)] = [:]

    /// How often to look for topics while some are claimable.
    private static let lookEvery: Duration = .milliseconds(500)

    /// How often a claim starts at the front of a topic, where late commits and returned requests are.
    private static let fromFrontEvery: Duration = .seconds(5)

    /// A topic with a rate may have none free, because other daemons take them. It is claimed again this soon, but not for longer
    /// than this after the last one that this daemon got.
    private static let rateRetry: (every: Duration, until: Duration) = (.milliseconds(50), .milliseconds(250))

    /// A look continues with the next page while fewer topics than this are claimable.
    private static let enough = 200

    var count: Int { claimable.count }

    /// The topics that can be claimed from now, in the order of their turns.
    func claimable(at now: ContinuousClock.Instant) -> [TopicScope] {
        if rated.isEmpty { return claimable }
        return claimable.filter { rated[$0].map { $0.claimAt <= now } ?? true }
    }

    /// When the rate of a topic allows the next claim, after this instant.
    func nextClaim(after now: ContinuousClock.Instant) -> ContinuousClock.Instant? {
        rated.values.lazy.map(\.claimAt).filter { $0 > now }.min()
    }

    /// The others have their turns before these.
    mutating func moveBack(_ topics: some Sequence<TopicScope>) {
        let topics = Set(topics)
        claimable = claimable.filter { !topics.contains($0) } + claimable.filter { topics.contains($0) }
    }

    /// Whether to read pages now, until `needsAnotherPage` is false.
    mutating func beginsLook(at now: ContinuousClock.Instant) -> Bool {
        let isLongEnough = isLookComplete || claimable.count >= Self.enough
        if !claimable.isEmpty, isLongEnough, let lookedAt, lookedAt.duration(to: now) < Self.lookEvery { return false }
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
        let known = Set(claimable)
        for topic in page.due {
            if topic.isValid && !covers(topic) {
                uncoveredSoFar.append(topic)
            } else if !known.contains(topic) {
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

    /// - Parameters:
    ///   - dueAt: When the last request that the claim looked at was due; nil when nothing was due.
    ///   - lastSendAt: When the rate of the topic lets the last claimed request be sent.
    mutating func claimed(
        _ topic: TopicScope, until dueAt: Instant?, lastSendAt: ContinuousClock.Instant? = nil,
        at now: ContinuousClock.Instant
    ) {
        if let lastSendAt {
            rated[topic] = (lastSendAt, lastSendAt - Outbox.pacedAhead)
        } else if dueAt == nil, let last = rated[topic]?.lastSendAt, now < last + Self.rateRetry.until {
            rated[topic]?.claimAt = now + Self.rateRetry.every
            return
        }
        guard let dueAt else { return forget(topic) }
        claimedUntil[topic] = (dueAt, claimedUntil[topic]?.since ?? now)
    }

    /// Whether nothing of the topic has been claimed since a look found it.
    func isJustFound(_ topic: TopicScope) -> Bool { claimedUntil[topic] == nil }

    /// Claims nothing of the topic until another look finds it.
    mutating func forget(_ topic: TopicScope) {
        claimable.removeAll { $0 == topic }
        claimedUntil[topic] = nil
        rated[topic] = nil
    }
}
