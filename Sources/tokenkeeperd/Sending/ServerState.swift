internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What this daemon has with one credential in one environment. Pure.
struct ServerState {
    var requests = RequestsInFlight()
    /// Nil unless a request was submitted and none has been answered since.
    private(set) var silence: Silence?

    /// Since when no request has got a response, and why.
    struct Silence {
        var since: ContinuousClock.Instant
        var failure: PushFailure?
    }

    /// - Returns: The requests to send now.
    mutating func submit(_ claimed: [ClaimedRequest], at now: ContinuousClock.Instant) -> [ClaimedRequest] {
        silence = silence ?? Silence(since: now)
        return requests.take(claimed)
    }

    mutating func note(_ end: PushOutcome.End) {
        switch end {
        case .answered: silence = nil
        // The first failure of a kind stays: the numbers in its message would change each time.
        case .unanswered(let failure)
        where failure.kind != .stopped && failure.kind != .backingOff && failure.kind != silence?.failure?.kind:
            silence?.failure = failure
        case .unanswered, .unsendable, .withdrawn: break
        }
    }

    /// `ResponseEvidence` lets a server pause after many failures. Even a single request must not fail to be sent unnoticed.
    ///
    /// - Parameters:
    ///   - patience: A failure is shown when no request has been answered for this long.
    ///   - isPausing: Whether the server pauses because of failures: they are shown at once, in the same words as later.
    func problem(
        of scope: CredentialScope, after patience: Duration, isPausing: Bool, at now: ContinuousClock.Instant
    ) -> WaitingProblem? {
        guard let silence, silence.since.duration(to: now) >= patience || (isPausing && silence.failure != nil) else {
            return nil
        }
        // A connection or a request without a response: both are the same outage.
        guard let failure = silence.failure, !failure.message.hasPrefix("no response") else {
            return WaitingProblem(
                "requests wait for a response (", "\(scope)", "): none has come for more than \(patience)")
        }
        let help = Self.help(failure).map { "; \($0)" } ?? ""
        return WaitingProblem("requests cannot be sent (", "\(scope)", "), and wait: \(failure.message)\(help)")
    }

    private static func help(_ failure: PushFailure) -> String? {
        func says(_ words: String...) -> Bool { words.contains { failure.message.contains($0) } }
        let isNotMade = [.connect, .tls].contains(failure.kind)
        if isNotMade, says("certificate is not yet valid", "certificate has expired") {
            return "check the clock of this machine"
        }
        if isNotMade, says("Too many open files") { return "raise LimitNOFILE of the service" }
        if isNotMade, says("error setting certificate file") { return "check send.ca_file" }
        // TLS 1.3 tells a client only after the handshake that its certificate is refused.
        if [.connect, .connectionLost].contains(failure.kind), says(" alert ") {
            return "check the credential, and any proxy that decrypts TLS"
        }
        return switch failure.kind {
        case .nameResolution: "check the DNS of this machine, and send.production_server and send.sandbox_server"
        case .connect where says("through the proxy"): "check send.proxy, and whether the proxy allows CONNECT to APNs"
        case .connect: "allow TCP connections to APNs (port 443) in the firewall, or set send.proxy"
        case .tls where says("subject name", "wrong version number"):
            "another server responds than APNs: check send.production_server, send.sandbox_server and send.proxy"
        case .tls where says("certificate problem", "verify locations", "issuer"):
            "install the package ca-certificates, or set send.ca_file"
        case .tls: "check the credential, and any proxy that decrypts TLS"
        case .timeout, .connectionLost, .protocolError, .identity, .backingOff, .stopped, .other: nil
        }
    }
}
