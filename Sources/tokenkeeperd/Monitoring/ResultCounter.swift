internal import Synchronization
internal import TokenLedger

/// The counter `results_total`. Its labels come from what senders write, so their number and size are bounded.
final class ResultCounter: Sendable {
    private final class Series: Sendable {
        /// As in the page: `{environment="production",…}`.
        let labels: String
        let results = Atomic(0)

        init(labels: String) { self.labels = labels }
    }

    private struct Key: Hashable {
        var environment, topic, status, reason: String

        var labels: String {
            MetricsText.text([
                ("environment", environment), ("topic", topic), ("status", status), ("reason", reason),
            ])
        }
    }

    private struct State {
        var series: [Key: Series] = [:]
        var inOrder: [Series] = []
        var bytes = 0
    }

    private let state = Mutex(State())
    private let topicLabels: TopicLabels

    /// The most bytes of all samples together: the page stays under 1 MB. Beyond that, new combinations count under the topic `other`, of
    /// which there are few, because there are only so many statuses and reasons.
    static let mostBytes = 200_000

    /// What a sample takes besides its labels: `tokenkeeper_results_total`, the value and the end of the line.
    private static let bytesBesidesLabels = 40

    init(_ topicLabels: TopicLabels) {
        self.topicLabels = topicLabels
    }

    /// Takes the counts of a committed batch.
    func add(_ counts: [ResultCount]) {
        for count in counts {
            let kind = count.kind
            let key = Key(
                environment: APNsLabels.environment(kind.environment), topic: topicLabels.label(of: kind.topic),
                status: APNsLabels.status(kind.status), reason: APNsLabels.reason(kind.reason))
            series(key).results.add(count.results, ordering: .relaxed)
        }
    }

    private func series(_ key: Key) -> Series {
        state.withLock { state in
            if let known = state.series[key] { return known }
            var key = key
            var labels = key.labels
            let bytes = labels.utf8.count + Self.bytesBesidesLabels
            if state.bytes + bytes > Self.mostBytes, key.topic != TopicLabels.other {
                key.topic = TopicLabels.other
                if let known = state.series[key] { return known }
                labels = key.labels
            }
            let new = Series(labels: labels)
            state.series[key] = new
            state.inOrder.append(new)
            state.bytes += labels.utf8.count + Self.bytesBesidesLabels
            return new
        }
    }

    /// The counts, in the order in which their labels first appeared.
    var samples: [(labels: String, value: Double)] {
        // Only references are copied here: the drain does not wait for a page that is being rendered.
        state.withLock { $0.inOrder }.map { ($0.labels, Double($0.results.load(ordering: .relaxed))) }
    }
}
