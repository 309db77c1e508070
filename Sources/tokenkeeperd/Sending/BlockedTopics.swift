internal import TokenModel

/// The topics whose claims fail because of their own requests. The sender skips each of them for a while, so that the others
/// continue. Pure.
struct BlockedTopics {
    private var blocked: [TopicScope: (error: String, until: ContinuousClock.Instant)] = [:]

    /// How long until a claim is tried again: after an error of its data, and after a lock of another session.
    private static let pause: (data: Duration, lock: Duration) = (.seconds(30), .seconds(2))

    mutating func block(_ topic: TopicScope, _ error: String, isLock: Bool, at now: ContinuousClock.Instant) {
        blocked[topic] = (error, now + (isLock ? Self.pause.lock : Self.pause.data))
    }

    /// A claim has succeeded.
    mutating func unblock(_ topic: TopicScope) {
        blocked[topic] = nil
    }

    /// A look at the outbox is complete.
    ///
    /// - Parameter waiting: The topics that have requests to claim, now or later. A claim of any other topic would have nothing to fail for.
    mutating func keep(only waiting: Set<TopicScope>) {
        blocked = blocked.filter { waiting.contains($0.key) }
    }

    func isBlocked(_ topic: TopicScope, at now: ContinuousClock.Instant) -> Bool {
        blocked[topic].map { now < $0.until } ?? false
    }

    /// One sentence per topic whose last claim failed, in the order of their names.
    var problems: [String] {
        blocked.sorted { $0.key.topic < $1.key.topic }.map {
            "requests for \($0.key) cannot be claimed and wait: \($0.value.error)"
        }
    }
}
