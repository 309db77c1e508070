import Foundation
import TestThreads
import Testing
import TokenLedger
import TokenModel

@testable import tokenkeeperd

@Suite struct `The text of a scrape` {
    @Test func `a metric has its help, its type, and a line for each set of labels`() {
        var text = MetricsText()
        text.add(
            "database_errors_total", .counter, "Errors of PostgreSQL.",
            [([("sqlstate_class", "53")], 2), ([("sqlstate_class", "none")], 0.5)])
        #expect(
            text.text == """
                # HELP tokenkeeper_database_errors_total Errors of PostgreSQL.
                # TYPE tokenkeeper_database_errors_total counter
                tokenkeeper_database_errors_total{sqlstate_class="53"} 2
                tokenkeeper_database_errors_total{sqlstate_class="none"} 0.5

                """)
    }

    @Test func `a metric without a value is absent`() {
        var text = MetricsText()
        text.add("queue_results", .gauge, "Results.", nil)
        text.add("results_total", .counter, "Results.", [])
        #expect(text.text.isEmpty)
    }

    @Test func `no label can end its line or its quotes`() {
        var text = MetricsText()
        text.add("x", .gauge, "a\\b\nc\"", [([("topic", "a\"b\\c\nd")], 1)])
        #expect(
            text.text == """
                # HELP tokenkeeper_x a\\\\b\\nc"
                # TYPE tokenkeeper_x gauge
                tokenkeeper_x{topic="a\\"b\\\\c\\nd"} 1

                """)
    }

    @Test func `a histogram is cumulative, in seconds`() {
        let histogram = DurationHistogram()
        for duration: Duration in [.zero, .microseconds(500), .microseconds(501), .milliseconds(1500), .seconds(31)] {
            histogram.record(duration)
        }
        var text = MetricsText()
        text.add("x_seconds", "X.", [([("environment", "sandbox")], histogram.counts)])
        let lines = text.text.split(separator: "\n")
        #expect(lines.count == 2 + 16 + 2)
        #expect(lines[1] == "# TYPE tokenkeeper_x_seconds histogram")
        #expect(lines[2] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="0.0005"} 2"#)
        #expect(lines[3] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="0.001"} 3"#)
        #expect(lines[12] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="1"} 3"#)
        #expect(lines[13] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="2.5"} 4"#)
        #expect(lines[16] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="30"} 4"#)
        #expect(lines[17] == #"tokenkeeper_x_seconds_bucket{environment="sandbox",le="+Inf"} 5"#)
        #expect(lines[18] == #"tokenkeeper_x_seconds_sum{environment="sandbox"} 32.501001"#)
        #expect(lines[19] == #"tokenkeeper_x_seconds_count{environment="sandbox"} 5"#)
    }

    @Test func `large whole numbers have all their digits`() {
        var text = MetricsText()
        text.add("x", .gauge, "X.", 1_795_553_070)
        #expect(text.text.hasSuffix("tokenkeeper_x 1795553070\n"))
    }
}
