internal import TokenModel

/// The topics and campaigns whose claims fail because of their own requests. The sender skips each of them for a while, so that the
/// others continue. Pure.
struct BlockedSources {
    private var blocked: [SendState.Source: (error: String, until: ContinuousClock.Instant)] = [:]

    /// How long until a claim is tried again: after an error of its data, and after a lock of another session or a lost connection.
    private let pause: (data: Duration, passing: Duration)

    init(_ timing: Timing) { pause = timing.blockedClaim }

    mutating func block(_ source: SendState.Source, _ error: String, isPassing: Bool, at now: ContinuousClock.Instant) {
        blocked[source] = (error, now + (isPassing ? pause.passing : pause.data))
    }

    /// A claim has succeeded.
    mutating func unblock(_ source: SendState.Source) {
        blocked[source] = nil
    }

    /// A look at the outbox is complete.
    ///
    /// - Parameter waiting: The sources that have requests to claim, now or later. A claim of any other would have nothing to fail for.
    mutating func keep(only waiting: Set<SendState.Source>) {
        blocked = blocked.filter { waiting.contains($0.key) }
    }

    func isBlocked(_ source: SendState.Source, at now: ContinuousClock.Instant) -> Bool {
        blocked[source].map { now < $0.until } ?? false
    }

    /// One sentence per source whose last claim failed, in the order of their names.
    var problems: [String] {
        blocked.sorted { ($0.key.topic, $0.key.campaign ?? 0) < ($1.key.topic, $1.key.campaign ?? 0) }.map {
            "requests for \($0.key) cannot be claimed and wait: \($0.value.error)"
        }
    }
}
