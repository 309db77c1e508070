internal import TokenModel

/// The tokens that get no request for a while: APNs has just said that they are stale or bad, and the ledger may not know it yet; or it has had too many
/// requests for them. Pure.
struct RestingTokens {
    private var until: [TokenAddress: ContinuousClock.Instant] = [:]
    private var prunedAt: ContinuousClock.Instant?

    /// Within this time, the ledger has recorded the response.
    static let untilRecorded: Duration = .seconds(2)
    private static let pruneEvery: Duration = .seconds(1)

    mutating func rest(_ address: TokenAddress, for pause: Duration, at now: ContinuousClock.Instant) {
        until[address] = now + pause
    }

    /// How long a token still rests; nil if requests may be sent to it.
    func remaining(_ address: TokenAddress, at now: ContinuousClock.Instant) -> Duration? {
        guard let end = until[address], now < end else { return nil }
        return now.duration(to: end)
    }

    /// Forgets the tokens whose rest is over. Does so only from time to time.
    mutating func prune(at now: ContinuousClock.Instant) {
        if let prunedAt, prunedAt.duration(to: now) <= Self.pruneEvery { return }
        prunedAt = now
        until = until.filter { $0.value > now }
    }
}
