internal import TokenLedger
internal import TokenModel

/// The requests that try a server or a topic after a pause: one at a time, until one is accepted. Pure.
///
/// APNs may never respond for some tokens, or refuse their requests for good, and a trial of such a token says nothing. So each trial
/// uses a token that was not tried before, from another part of the outbox. However many such tokens are due first, they do not
/// keep the others waiting for long.
struct Trial {
    /// How many requests a trial chooses from.
    static let candidates = 100

    /// The other candidates wait this long. They are then due later than all requests that are due now, so the next trial chooses
    /// from others.
    static let othersWait: Duration = .seconds(1)

    /// The token whose request is in flight.
    private(set) var token: TokenAddress?
    /// How often a request was to be chosen since one was last accepted.
    private(set) var number = 0
    /// The tokens whose trial was in vain, with the number of the last one.
    private var tried: [TokenAddress: Int] = [:]

    /// Chooses the first request of a token that was not tried, or else of the one tried longest ago.
    ///
    /// - Returns: Nil if there is no candidate.
    mutating func choose(from candidates: [ClaimedRequest]) -> ClaimedRequest? {
        number += 1
        var tokens: Set<TokenAddress> = []
        let firsts = candidates.filter { tokens.insert($0.request.address).inserted }
        let longestAgo = firsts.map { tried[$0.request.address] ?? 0 }.min()
        let untried = firsts.filter { tried[$0.request.address] ?? 0 == longestAgo }
        // One that was refused before is likely to be refused again. One that was never sent may be behind many that are.
        let least = untried.map(\.refusals).min()
        let new = number.isMultiple(of: 2) ? untried.filter { $0.attempts == 0 } : []
        let best = new.isEmpty ? untried.filter { $0.refusals == least } : new
        if best.isEmpty { return nil }
        // Multiples of the golden ratio spread evenly: tokens without a response that were queued together are soon left behind.
        let place = (Double(number) * 0.618).truncatingRemainder(dividingBy: 1)
        let chosen = best[Int(place * Double(best.count))]
        token = chosen.request.address
        return chosen
    }

    /// The request has ended.
    ///
    /// - Parameter isInVain: Whether it was sent and not accepted.
    mutating func ended(isInVain: Bool) {
        if isInVain, let token { tried[token] = number }
        token = nil
    }
}
