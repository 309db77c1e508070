internal import APNsFeedback
internal import TokenModel

/// Counts for metrics what became of requests, by credential and environment. Pure.
///
/// A request counts whenever a try has ended, with or without a response. What was never tried does not count, except what the gate
/// suppressed, and what was left of a campaign that has expired.
struct SendCounts {
    /// What became of a request. The names are those of `RequestFate` and of the log.
    enum Outcome: String {
        /// APNs responded, and the request is finished.
        case answered
        /// It moved to `failed_send`.
        case failed
        /// It is retried later.
        case retried
        /// It may have been delivered, and is retried once.
        case interrupted
        /// It waits again as if it had not been tried.
        case returned
        /// The gate withheld it, and it moved to `suppressed_send`.
        case suppressed
        /// Its campaign has expired, and it was not sent.
        case expired

        fileprivate init(_ fate: RequestFate) {
            self =
                switch fate {
                case .answered: .answered
                case .failed: .failed
                case .later, .refused: .retried
                case .interrupted: .interrupted
                case .returned: .returned
                }
        }
    }

    /// What is counted apart. Each part has a bounded set of values.
    struct Kind: Hashable {
        /// Nil if there was no response; 0 if APNs has no such status.
        var status: Int32?
        /// As in `APNsLabels`; the kind of `PushFailure` if there was no response.
        var reason: String
        var outcome: Outcome

        /// The status as a label.
        var statusLabel: String { status.map { APNsLabels.status($0) } ?? "none" }
    }

    private struct Scope {
        /// How many requests APNs accepted. Nearly all are of this kind, so it is not looked up.
        var accepted = 0
        var others: [Kind: Int] = [:]
    }

    private var scopes: [CredentialScope: Scope] = [:]

    static let accepted = Kind(status: 200, reason: "", outcome: .answered)

    /// The counts of a credential in an environment. That of the accepted requests comes first, even if it is 0.
    func kinds(of scope: CredentialScope) -> [(kind: Kind, requests: Int)] {
        let counts = scopes[scope] ?? Scope()
        return [(Self.accepted, counts.accepted)] + counts.others.map { ($0.key, $0.value) }
    }

    /// All of them.
    var total: Int { scopes.values.reduce(0) { $0 + $1.accepted + $1.others.values.reduce(0, +) } }

    mutating func add(_ outcome: PushOutcome, _ fate: RequestFate, in scope: CredentialScope) {
        switch outcome.end {
        case .answered(let response) where response.status == 200 && fate == .answered:
            scopes[scope, default: Scope()].accepted += 1
        case .answered(let response):
            let status = Interpretation.statuses.contains(response.status) ? response.status : 0
            add(
                1,
                Kind(
                    status: status, reason: APNsLabels.reason(response.reason ?? Verdict.noReason),
                    outcome: Outcome(fate)), in: scope)
        case .unanswered(let failure):
            add(1, Kind(status: nil, reason: failure.kind.rawValue, outcome: Outcome(fate)), in: scope)
        case .unsendable, .withdrawn: break
        }
    }

    /// The gate has withheld requests.
    mutating func add(suppressed requests: Int, in scope: CredentialScope) {
        if requests > 0 { add(requests, Kind(status: nil, reason: "", outcome: .suppressed), in: scope) }
    }

    /// Requests of campaigns that have expired were not sent.
    mutating func add(expired requests: Int, in scope: CredentialScope) {
        if requests > 0 { add(requests, Kind(status: nil, reason: "", outcome: .expired), in: scope) }
    }

    private mutating func add(_ requests: Int, _ kind: Kind, in scope: CredentialScope) {
        scopes[scope, default: Scope()].others[kind, default: 0] += requests
    }
}
