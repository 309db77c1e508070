internal import APNsFeedback
internal import TokenModel

/// Since when the requests of a credential have got no response at all, why, and what helps. Pure.
///
/// `ResponseEvidence` lets a server pause after many failures. Even a single request must not fail to be sent unnoticed.
struct UnansweredRequests {
    private struct Wait {
        var since: ContinuousClock.Instant
        var failure: PushFailure?
    }

    private var waits: [CredentialScope: Wait] = [:]

    /// A failure is reported when no request has been answered for this long.
    private let reportedAfter: Duration

    init(_ timing: Timing) { reportedAfter = timing.unanswered }

    /// Whether a request has been submitted, and none of its credential has been answered since.
    var isEmpty: Bool { waits.isEmpty }

    mutating func submitted(in scope: CredentialScope, at now: ContinuousClock.Instant) {
        if waits[scope] == nil { waits[scope] = Wait(since: now) }
    }

    mutating func ended(_ end: PushOutcome.End, in scope: CredentialScope) {
        switch end {
        case .answered: if !waits.isEmpty { waits[scope] = nil }
        // The first failure of a kind stays: the numbers in its message would change each time.
        case .unanswered(let failure)
        where failure.kind != .stopped && failure.kind != .backingOff && failure.kind != waits[scope]?.failure?.kind:
            waits[scope]?.failure = failure
        case .unanswered, .unsendable, .withdrawn: break
        }
    }

    /// - Parameter hasRequests: Whether requests of a credential wait or are in flight.
    mutating func keep(where hasRequests: (CredentialScope) -> Bool) {
        waits = waits.filter { hasRequests($0.key) }
    }

    /// One for each credential and environment, in their order.
    func problems(at now: ContinuousClock.Instant) -> [(scope: CredentialScope, problem: WaitingProblem)] {
        waits.sorted { $0.key < $1.key }.compactMap { scope, wait in
            guard let failure = wait.failure, wait.since.duration(to: now) >= reportedAfter else { return nil }
            let help = Self.help(failure).map { "; \($0)" } ?? ""
            return (
                scope, WaitingProblem("requests cannot be sent (", "\(scope)", "), and wait: \(failure.message)\(help)")
            )
        }
    }

    private static func help(_ failure: PushFailure) -> String? {
        switch failure.kind {
        case .nameResolution: "check the DNS of this machine, and send.production_server and send.sandbox_server"
        case .connect: "allow TCP connections to APNs (port 443) in the firewall, or set send.proxy"
        case .tls
        where ["certificate problem", "verify locations", "issuer"].contains { failure.message.contains($0) }:
            "install the package ca-certificates, or set send.ca_file"
        case .tls: "check the credential, and any proxy that decrypts TLS"
        case .timeout, .connectionLost, .protocolError, .identity, .backingOff, .stopped, .other: nil
        }
    }
}
