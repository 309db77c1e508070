internal import TokenLedger
internal import TokenModel

/// The requests that try a server out after a rest: one at a time, until the server responds. Pure.
///
/// APNs may never respond for some tokens, and a trial of such a token takes as long as a response may take. So each trial
/// uses a token that was not tried before, from another part of the outbox. However many such tokens are due first, they do not
/// keep the others waiting for long.
struct Trials {
    /// How many requests a trial chooses from.
    static let candidates = 100

    /// The other candidates wait this long. They are then due later than all requests that are due now, so the next trial chooses
    /// from others.
    static let othersWait: Duration = .seconds(1)

    private struct Trial {
        /// The token whose request is in flight.
        var token: TokenAddress?
        /// How often a request was to be chosen since the server last responded.
        var number = 0
        /// The tokens whose trial got no response, with the number of the last one.
        var tried: [TokenAddress: Int] = [:]
    }

    private var trials: [CredentialScope: Trial] = [:]

    var isEmpty: Bool { trials.isEmpty }

    /// The servers that are being tried out at this moment.
    var underWay: [CredentialScope] { trials.filter { $0.value.token != nil }.map(\.key) }

    /// Whether the request in flight for a token is the trial of its server.
    func isTrial(_ token: TokenAddress, in scope: CredentialScope) -> Bool {
        !isEmpty && trials[scope]?.token == token
    }

    /// Of the trial turns of each server, keeps one, of another topic or campaign each time; none while a trial is under way.
    func narrow(_ turns: [SendState.Turn]) -> [SendState.Turn] {
        var kept = turns
        for (scope, own) in Dictionary(grouping: turns.filter(\.isTrial), by: \.scope) {
            let trial = trials[scope] ?? Trial()
            let next = trial.token == nil ? own[trial.number % own.count].source : nil
            kept.removeAll { $0.scope == scope && $0.source != next }
        }
        return kept
    }

    /// Chooses the first request of a token that was not tried, or else of the one tried longest ago.
    ///
    /// - Returns: Nil if there is no candidate.
    mutating func choose(from candidates: [ClaimedRequest], in scope: CredentialScope) -> ClaimedRequest? {
        var trial = trials[scope] ?? Trial()
        defer { trials[scope] = trial }
        trial.number += 1
        var tokens: Set<TokenAddress> = []
        let firsts = candidates.filter { tokens.insert($0.request.address).inserted }
        let longestAgo = firsts.map { trial.tried[$0.request.address] ?? 0 }.min()
        let best = firsts.filter { trial.tried[$0.request.address] ?? 0 == longestAgo }
        if best.isEmpty { return nil }
        // Multiples of the golden ratio spread evenly: tokens without a response that were queued together are soon left behind.
        let place = (Double(trial.number) * 0.618).truncatingRemainder(dividingBy: 1)
        let chosen = best[Int(place * Double(best.count))]
        trial.token = chosen.request.address
        return chosen
    }

    /// The trial has ended, and the server needs another one.
    ///
    /// - Parameter isUnanswered: Whether the request was sent and got no response.
    mutating func ended(in scope: CredentialScope, isUnanswered: Bool) {
        guard var trial = trials[scope], let token = trial.token else { return }
        trial.token = nil
        if isUnanswered { trial.tried[token] = trial.number }
        trials[scope] = trial
    }

    /// The server responds again.
    mutating func succeeded(in scope: CredentialScope) {
        trials[scope] = nil
    }
}
