import LedgerTestSupport
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

@Suite struct `The counter of results` {
    private static func counter(_ topics: [String]) -> ResultCounter {
        let labels = TopicLabels()
        labels.take(topics)
        return ResultCounter(labels)
    }

    private static func count(
        _ environment: String?, _ topic: String?, _ status: Int32?, _ reason: String? = nil, _ results: Int = 1
    ) -> ResultCount {
        ResultCount(
            kind: ResultKind(environment: environment, topic: topic, status: status, reason: reason), results: results)
    }

    @Test(arguments: [
        (
            count("sandbox", "t", 410, "Unregistered"),
            #"{environment="sandbox",topic="t",status="410",reason="Unregistered"}"#
        ),
        (count("production", "t", 200), #"{environment="production",topic="t",status="200",reason=""}"#),
        (count("staging", "u", 299, "aabbccdd"), #"{environment="other",topic="other",status="other",reason="other"}"#),
        (
            count(nil, nil, nil, "(rejected)"),
            #"{environment="other",topic="other",status="other",reason="(rejected)"}"#
        ),
        (
            count("production", "t", 410, "410 without a body"),
            #"{environment="production",topic="t",status="410",reason="410 without a body"}"#
        ),
    ])
    func `what APNs does not have counts as other`(_ count: ResultCount, _ labels: String) {
        let counter = Self.counter(["t"])
        counter.add([count])
        #expect(counter.samples.map(\.labels) == [labels])
        #expect(counter.samples.map(\.value) == [1])
    }

    @Test func `equal kinds add up`() {
        let counter = Self.counter(["t"])
        counter.add([Self.count("production", "t", 200, nil, 5), Self.count("production", "u", 200, nil, 2)])
        counter.add([Self.count("production", "t", 200, nil, 7), Self.count("production", "v", 200, nil, 3)])
        #expect(counter.samples.map(\.value) == [12, 5])
    }

    @Test func `with ten thousand topics, the page stays under a megabyte, and no result is lost`() {
        // As long as topics are in practice, and with what takes most room in a page.
        let topics = (1...10_000).map { "com.example.\"some\\\n\".app\($0).voip" }
        let labels = TopicLabels()
        labels.take(topics)
        let metrics = ProcessMetrics(topicLabels: labels)
        var results = 0
        for environment in ["production", "sandbox", "staging"] {
            for status in Array(Int32(395)...430) {
                for reason in [
                    "Unregistered", "ExpiredToken", "BadDeviceToken", "DeviceTokenNotForTopic", "TooManyRequests",
                ] {
                    metrics.add(
                        topics.prefix(600).map { Self.count(environment, $0, status, reason, 3) }, took: .zero)
                    results += 600 * 3
                }
            }
        }
        metrics.add(topics.map { Self.count("production", $0, 200) }, took: .zero)
        results += topics.count
        let text = metrics.text(ServiceState(), sweepInterval: nil)
        #expect(text.utf8.count < 1_000_000)
        let lines = text.split(separator: "\n").filter { $0.hasPrefix("tokenkeeper_results_total{") }
        #expect(lines.count > 1000)
        #expect(Set(lines.map { $0.prefix { $0 != "}" } }).count == lines.count)
        #expect(lines.compactMap { $0.split(separator: " ").last.flatMap { Int($0) } }.reduce(0, +) == results)
    }
}

@Suite struct `A page that is kept` {
    @Test func `it is rendered once a second, however often it is asked for`() {
        let cache = PageCache()
        let start = ContinuousClock.now
        var rendered = 0
        for milliseconds in 0..<2500 {
            _ = cache.page(at: start + .milliseconds(milliseconds)) {
                rendered += 1
                return MonitoringPage(text: "\(rendered)")
            }
        }
        #expect(rendered == 3)
    }
}
