internal import APNsFeedback
internal import FoundationEssentials
internal import Synchronization
internal import TokenModel

/// The metrics of sending, `tokenkeeper_apns_…` and the expiry of credentials. Empty if this daemon does not send.
final class SendMetrics: Sendable {
    private struct State {
        var senders: [CredentialAtWork] = []
        var counts = SendCounts()
        var unanswered: [CredentialScope: ContinuousClock.Instant] = [:]
    }

    private let state = Mutex(State())
    private let responseTimes = Dictionary(
        uniqueKeysWithValues: Environment.allCases.map { ($0, DurationHistogram()) })

    /// Takes the clients that send. Their state may be read at any time.
    func watch(_ senders: [CredentialAtWork]) {
        state.withLock { $0.senders = senders }
    }

    /// Takes how long responses took.
    func record(_ outcomes: [PushOutcome]) {
        for outcome in outcomes {
            if let time = outcome.responseTime { responseTimes[outcome.request.address.environment]?.record(time) }
        }
    }

    /// Takes all counts since the start, and since when the requests of a credential have had no response.
    func publish(_ counts: SendCounts, unanswered: [CredentialScope: ContinuousClock.Instant]) {
        state.withLock { ($0.counts, $0.unanswered) = (counts, unanswered) }
    }

    /// Adds the metrics.
    func add(to text: inout MetricsText) {
        let state = state.withLock { $0 }
        let servers = state.senders.flatMap { sender in
            sender.credential.settings.environments.sorted { $0.rawValue < $1.rawValue }.map {
                (
                    labels: [("credential", sender.credential.settings.name), ("environment", $0.rawValue)],
                    scope: CredentialScope(
                        credential: sender.credential.settings.name, environment: $0.rawValue),
                    state: sender.client.state[$0]
                )
            }
        }
        text.add(
            "apns_requests_total", .counter,
            "Requests whose try has ended, by APNs' response and what became of them; and those that the gate suppressed or that expired with their campaign.",
            servers.flatMap { server in
                state.counts.kinds(of: server.scope).map { kind, requests in
                    (
                        server.labels + [
                            ("status", kind.statusLabel), ("reason", kind.reason), ("outcome", kind.outcome.rawValue),
                        ], Double(requests)
                    )
                }
            })
        let environments = Set(state.senders.flatMap { $0.credential.settings.environments })
        text.add(
            "apns_request_duration_seconds", "How long APNs took to respond, from the end of the request.",
            Environment.allCases.filter(environments.contains).compactMap { environment in
                responseTimes[environment].map { ([("environment", environment.rawValue)], $0.counts) }
            })
        text.add(
            "apns_in_flight", .gauge, "Requests that wait for APNs' response.",
            servers.map { ($0.labels, Double($0.state.inFlight)) })
        text.add(
            "apns_unanswered_since_timestamp_seconds", .gauge,
            "Since when requests have been sent, or tried, without any response. Absent after a response.",
            servers.compactMap { server in
                state.unanswered[server.scope].map {
                    (server.labels, Date.now.timeIntervalSince1970 - $0.duration(to: .now) / .seconds(1))
                }
            })
        text.add(
            "apns_connections", .gauge, "Open connections to APNs, including those that are being made.",
            servers.map { ($0.labels, Double($0.state.connectionsOpen)) })
        text.add(
            "credential_usable", .gauge, "Whether the files of a credential can be used: 1 or 0.",
            state.senders.map { ([("credential", $0.credential.settings.name)], $0.credential.fault == nil ? 1 : 0) })
        text.add(
            "credential_expiry_timestamp_seconds", .gauge, "When the certificate of a credential expires.",
            state.senders.compactMap { sender in
                sender.credential.loaded?.expiresAt.map {
                    ([("credential", sender.credential.settings.name)], $0.date.timeIntervalSince1970)
                }
            })
    }
}
