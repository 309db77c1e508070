import TestThreads
import Testing

@testable import tokenkeeperd

@Suite struct `The line that shows progress` {
    private let start = ContinuousClock.now

    @Test func `it shows the share, the count, the rate and the time left`() {
        var line = ProgressLine("public.devices", items: "rows", total: 200_000, at: start)
        #expect(
            line.text(width: 100, at: start) == "public.devices  [" + String(repeating: " ", count: 30)
                + "]  0 %  0 rows")
        line.advance(steps: 50_000, count: 50_000)
        let shown = line.text(width: 100, at: start + .seconds(10))
        #expect(
            shown == "public.devices  [=======" + String(repeating: " ", count: 23)
                + "]  25 %  50000 rows  5000/s  0:30 left")
        line.advance(steps: 149_999, count: 149_999)
        #expect(line.text(width: 100, at: start + .seconds(40)).contains("]  99 %  199999 rows"))
        line.advance(steps: 1, count: 1)
        #expect(
            line.text(width: 100, at: start + .seconds(40)).hasSuffix(
                "[==============================]  100 %  200000 rows  5000/s"))
    }

    @Test func `the total may become known later`() {
        var line = ProgressLine("c", items: "requests", total: nil, at: start)
        line.advance(steps: 10, count: 10)
        line.expect(total: 40)
        #expect(line.text(width: 32, at: start) == "c  [==      ]  25 %  10 requests")
    }

    @Test func `what an earlier run did says nothing about the speed`() {
        var line = ProgressLine("f.csv", items: "lines", total: 1000, steps: 500, count: 50, at: start)
        line.advance(steps: 100, count: 10)
        #expect(line.text(width: 80, at: start + .seconds(10)).hasSuffix("]  60 %  60 lines  1/s  0:40 left"))
    }

    @Test func `without a total, or beyond an estimate, there is no share`() {
        var unknown = ProgressLine("-", items: "lines", total: nil, at: start)
        unknown.advance(steps: 70, count: 7)
        #expect(unknown.text(width: 80, at: start + .seconds(7)) == "-  7 lines  1/s")
        var beyond = ProgressLine("t", items: "rows", total: 10, at: start)
        beyond.advance(steps: 11, count: 11)
        #expect(beyond.text(width: 80, at: start) == "t  11 rows")
        #expect(ProgressLine("t", items: "rows", total: 0, at: start).text(width: 80, at: start) == "t  0 rows")
    }

    @Test func `a reason to wait takes the place of the time left, until work goes on`() {
        var line = ProgressLine("t", items: "rows", total: 100, at: start)
        line.advance(steps: 50, count: 50)
        line.waiting = "waits for the queue"
        #expect(line.text(width: 30, at: start + .seconds(5)) == "50 %  50 rows  10/s")
        #expect(line.text(width: 80, at: start + .seconds(5)).hasSuffix("  10/s  waits for the queue"))
        line.advance(steps: 1, count: 1)
        #expect(!line.text(width: 80, at: start + .seconds(5)).contains("waits"))
    }

    @Test func `it fits every width`() {
        var line = ProgressLine("public.a_table_with_a_long_name", items: "rows", total: 5_000_000, at: start)
        line.advance(steps: 1_000_000, count: 1_000_000)
        for width in 0...120 { #expect(line.text(width: width, at: start + .seconds(3601)).count <= width) }
        #expect(line.text(width: 20, at: start + .seconds(3601)) == "20 %  1000000 rows")
        #expect(line.text(width: 120, at: start + .seconds(3600)).hasSuffix("4:00:00 left"))
    }

    @Test func `control characters of a name do not reach the terminal`() {
        let line = ProgressLine("a\u{1B}[2Jb", items: "rows", total: nil, at: start)
        #expect(!line.text(width: 80, at: start).contains("\u{1B}"))
    }
}
