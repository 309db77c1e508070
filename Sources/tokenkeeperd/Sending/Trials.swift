internal import TokenLedger
internal import TokenModel

/// The requests that try a subject out after a pause, a server or a topic: one at a time, until one is accepted. Pure.
///
/// APNs may never respond for some tokens, or refuse their requests for good, and a trial of such a token says nothing. So each trial
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
        /// How often a request was to be chosen since one was last accepted.
        var number = 0
        /// The tokens whose trial was in vain, with the number of the last one.
        var tried: [TokenAddress: Int] = [:]
    }

    private var trials: [ResponseEvidence.Subject: Trial] = [:]

    var isEmpty: Bool { trials.isEmpty }

    func isUnderWay(_ subject: ResponseEvidence.Subject) -> Bool { trials[subject]?.token != nil }

    /// The subject whose trial the request in flight for a token is.
    func trial(of token: TokenAddress, in scope: CredentialScope) -> ResponseEvidence.Subject? {
        if isEmpty { return nil }
        return [.server(scope), .topic(token.scope)].first { trials[$0]?.token == token }
    }

    /// Of the trial turns of each subject, keeps one, of another topic or campaign each time; none while a trial is under way.
    func narrow(_ turns: [SendState.Turn]) -> [SendState.Turn] {
        var kept = turns
        for (subject, own) in Dictionary(grouping: turns.filter(\.isTrial), by: { $0.trial! }) {
            let trial = trials[subject] ?? Trial()
            let next = trial.token == nil ? own[trial.number % own.count].source : nil
            kept.removeAll { $0.trial == subject && $0.source != next }
        }
        return kept
    }

    /// Chooses the first request of a token that was not tried, or else of the one tried longest ago.
    ///
    /// - Returns: Nil if there is no candidate.
    mutating func choose(
        from candidates: [ClaimedRequest], for subject: ResponseEvidence.Subject
    ) -> ClaimedRequest? {
        var trial = trials[subject] ?? Trial()
        defer { trials[subject] = trial }
        trial.number += 1
        var tokens: Set<TokenAddress> = []
        let firsts = candidates.filter { tokens.insert($0.request.address).inserted }
        let longestAgo = firsts.map { trial.tried[$0.request.address] ?? 0 }.min()
        let untried = firsts.filter { trial.tried[$0.request.address] ?? 0 == longestAgo }
        // One that was refused before is likely to be refused again.
        let least = untried.map(\.refusals).min()
        let best = untried.filter { $0.refusals == least }
        if best.isEmpty { return nil }
        // Multiples of the golden ratio spread evenly: tokens without a response that were queued together are soon left behind.
        let place = (Double(trial.number) * 0.618).truncatingRemainder(dividingBy: 1)
        let chosen = best[Int(place * Double(best.count))]
        trial.token = chosen.request.address
        return chosen
    }

    /// The trial has ended, and the subject needs another one.
    ///
    /// - Parameter isInVain: Whether the request was sent and not accepted.
    mutating func ended(_ subject: ResponseEvidence.Subject, isInVain: Bool) {
        guard var trial = trials[subject], let token = trial.token else { return }
        trial.token = nil
        if isInVain { trial.tried[token] = trial.number }
        trials[subject] = trial
    }

    /// Forgets the subjects that need no trial any more.
    mutating func keep(where isOnTrial: (ResponseEvidence.Subject) -> Bool) {
        trials = trials.filter { isOnTrial($0.key) }
    }
}
