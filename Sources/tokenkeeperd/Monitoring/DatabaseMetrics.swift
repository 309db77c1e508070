internal import Synchronization
internal import TokenLedger

/// The gauges of the database, `tokenkeeper_database_…`, as `MonitorWorker` last saw them. Each daemon exports all of them.
final class DatabaseMetrics: Sendable {
    private struct Snapshot {
        /// With the labels as in the page, so that a scrape does not have to make them.
        var byTopic: [TopicGauge: [(labels: String, value: Double)]]
        var totals: [DatabaseTotal: Double]
        var critical: [(labels: String, value: Double)]
        var warnings: [(labels: String, value: Double)]
        /// When it is too old to export.
        var until: ContinuousClock.Instant
    }

    private let snapshot = Mutex<Snapshot?>(nil)

    /// Takes the result of a look.
    ///
    /// - Parameter until: When it is too old to export.
    func take(_ gauges: DatabaseGauges, until: ContinuousClock.Instant) {
        var byTopic: [TopicGauge: [(labels: String, value: Double)]] = [:]
        for (gauge, samples) in gauges.byTopic {
            byTopic[gauge] = samples.map { (MetricsText.text(gauge.labels(of: $0)), $0.value) }
        }
        // Two may look the same once they are shortened.
        var seen: Set<String> = []
        let critical = gauges.critical.map { page in
            let labels = [
                ("cause", page.cause), ("environment", page.environment),
                ("topic", HistoryText.withoutTokens(page.topic)),
                ("warning", HistoryText.withoutTokens(page.warning)),
            ]
            return (labels: MetricsText.text(labels), value: 1.0)
        }.filter { seen.insert($0.labels).inserted }
        let warnings = gauges.warnings.map { (MetricsText.text([("source", $0.source)]), Double($0.count)) }
        let taken = Snapshot(
            byTopic: byTopic, totals: gauges.totals, critical: critical, warnings: warnings, until: until)
        snapshot.withLock { $0 = taken }
    }

    /// Adds the gauges; nothing if they are too old. A gauge whose look failed is absent.
    func add(to text: inout MetricsText, at now: ContinuousClock.Instant = .now) {
        guard let snapshot = snapshot.withLock({ $0 }), now < snapshot.until else { return }
        text.add(
            "database_critical", .gauge,
            "What somebody has to get up for, as in the view critical_warning. Always 1; absent if all is well.",
            rendered: snapshot.critical)
        text.add(
            "database_warnings", .gauge, "Warnings of status that take a search, by what was searched for.",
            rendered: snapshot.warnings)
        for gauge in TopicGauge.allCases {
            text.add("database_\(gauge.rawValue)", .gauge, gauge.help, rendered: snapshot.byTopic[gauge] ?? [])
        }
        for total in DatabaseTotal.allCases {
            text.add("database_\(total.rawValue)", .gauge, total.help, snapshot.totals[total])
        }
    }
}

extension TopicGauge {
    fileprivate func labels(of sample: DatabaseGauges.Sample) -> MetricsText.Labels {
        [("environment", sample.environment), ("topic", sample.topic)]
            + (detailLabel.map { [($0, sample.detail ?? "")] } ?? [])
    }

    fileprivate var help: String {
        switch self {
        case .tokens: "Tokens by state."
        case .guardTripped: "Whether the mass-failure guard has tripped and holds suspects."
        case .topicPaused: "Whether sending is paused."
        case .sweepRefusedTokens: "Tokens that the last sweep refused to prune, because too much was due."
        case .campaignRequests: "Requests of campaigns that were addressed and have not ended."
        case .outboxOldestDue: "Since when the longest waiting request is due. Paused topics are left out."
        case .newlyStaleTokens: "Active tokens that newly turned stale within the hour or the day."
        case .newlyStaleShare: "Active tokens that newly turned stale, as a share of all active tokens."
        case .staleWave: "Whether far more tokens than usual turn stale."
        }
    }
}

extension DatabaseTotal {
    fileprivate var help: String {
        switch self {
        case .outboxRequests: "Requests in send_request; 10000 means 10000 or more."
        case .openCampaigns: "Campaigns that are being sent, or wait for their time or for a daemon."
        case .heldResults: "Results in held_result; 10000 means 10000 or more."
        case .rejectedResults: "Results in rejected_result; 10000 means 10000 or more."
        case .rejectedRegistrations: "Registrations in rejected_registration; 10000 means 10000 or more."
        case .failedSends: "Requests in failed_send; 10000 means 10000 or more."
        case .liveDaemons: "Daemons that have reported within 30 seconds."
        case .attachedTables: "Tables that are attached."
        case .brokenAttachments: "Attached tables whose changes do not all arrive."
        case .lastSweepSuccess: "When the last sweep finished without failure."
        }
    }
}
