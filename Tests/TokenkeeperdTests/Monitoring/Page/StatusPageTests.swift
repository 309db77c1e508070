import Foundation
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

@Suite struct `The status page` {
    private static let now = Instant(microseconds: 1_800_000_000_000_000)

    private func overview(
        _ warnings: [String] = [], critical: Int = 0, daemons: [Overview.Daemon] = [],
        campaigns: [CampaignProgress] = [], attachments: [Overview.Attachment] = []
    ) -> Overview {
        Overview(
            at: Self.now, warnings: warnings, critical: critical, queueDepth: 0, isQueueEstimated: false,
            oldestResultAge: nil, rejected: 0,
            held: 0, requests: 10_000, failedSends: 0, tokens: [1_234_567, 89, 0, 0, 0],
            daemons: daemons, campaigns: campaigns, attachments: attachments)
    }

    private func history(_ topic: String, reason: String? = nil, samples: Int = 0) -> OverviewHistory {
        OverviewHistory(
            hours: (0...24).map { hour in
                .init(
                    at: Self.now.advanced(byMicroseconds: Int64(hour - 24) * 3_600_000_000), accepted: Int64(hour),
                    stale: 1, other: 0)
            }, kinds: [.init(status: 410, reason: reason, results: 25)],
            topics: [
                .init(environment: "production", topic: topic, active: 5, suppressed: 1, newlyStale: 1, activeBefore: 8)
            ], topicCount: 3,
            sweeps: [],
            tokens: Overview.states.map { _ in
                (0..<samples).map {
                    (Self.now.advanced(byMicroseconds: Int64($0 - samples) * 3_600_000_000), Int64($0))
                }
            })
    }

    private func page(
        _ overview: Overview?, _ history: OverviewHistory? = nil, obstacle: String? = nil, isOld: Bool = false
    ) -> String {
        StatusPage(
            overview: overview, history: history, daemonStatus: "starting", obstacles: [obstacle].compactMap { $0 },
            isOld: isOld, now: Self.now
        ).html(nonce: "n0nce").text
    }

    @Test func `a text of others becomes no command`() {
        let shown = page(
            overview([
                "the guard of com.`rm -rf ~`.app tripped; see `tokenkeeperd held list`",
                "x`y: see `tokenkeeperd held list`", "`tokenkeeperd sweep; rm x`", "`tokenkeeperd sweep $(rm)`",
                "`tokenkeeperd sweep \"$HOME\"`", "if that is a mistake: `tokenkeeperd reinstate --topic 'a$b'`",
            ]))
        let commands = shown.matches(of: #/<code>(.*?)</code>/#).map { String($0.output.1) }
        #expect(commands == ["tokenkeeperd held list", "tokenkeeperd reinstate --topic &#39;a$b&#39;"])
    }

    @Test func `it says that all is well only once the database was read and has no warning`() {
        #expect(page(overview()).contains("Nothing needs attention"))
        for broken in [
            page(nil), page(overview(["the guard tripped"])), page(overview(), obstacle: "waiting for PostgreSQL"),
            page(overview(), isOld: true),
        ] {
            #expect(!broken.contains("Nothing needs attention"))
        }
        let both = page(overview(["see `tokenkeeperd held list`"]), obstacle: "waiting for PostgreSQL")
        #expect(
            both.contains(
                "<li class=\"critical\">waiting for PostgreSQL</li><li>see <code>tokenkeeperd held list</code></li>"))
        #expect(both.contains("<h2>When the database was last read</h2>"))
        #expect(both.contains("<title>(2) tokenkeeperd</title>"))
    }

    @Test func `what somebody has to get up for is marked`() {
        #expect(!page(overview(["a"])).contains("class=\"attention critical\""))
        let html = page(overview(["a", "b"], critical: 1))
        #expect(html.contains("<section class=\"attention critical\">"))
        #expect(html.contains("<li class=\"critical\">a</li><li>b</li>"))
    }

    @Test func `what was read is old once three looks are missing`() {
        let cache = OverviewCache()
        let start = ContinuousClock.now
        cache.store(overview(), at: start)
        cache.expect(within: .seconds(5))
        #expect(!cache.contents.isOld(at: start + .seconds(15)))
        #expect(cache.contents.isOld(at: start + .seconds(16)))
        cache.store(overview(), at: start + .seconds(16))
        #expect(!cache.contents.isOld(at: start + .seconds(17)))
    }

    @Test func `a worker that waits for a response is an obstacle`() {
        var state = ServiceState()
        state.beat(.drain, heardOfBy: .now + .seconds(60), unansweredFor: .seconds(4))
        #expect(state.obstacles == [])
        state.beat(.drain, heardOfBy: .now + .seconds(60), unansweredFor: .seconds(9))
        state.beat(.sweep, heardOfBy: .now + .seconds(60), unansweredFor: .seconds(9))
        #expect(state.obstacles == ["waiting for PostgreSQL to answer the drain for 9 s"])
    }

    @Test func `what a lock keeps status from counting is shown as unknown, not as zero`() {
        let locked = Overview(
            at: Self.now, warnings: ["a table is locked"], critical: 0, queueDepth: 7,
            isQueueEstimated: false,
            oldestResultAge: nil,
            rejected: nil, held: nil, requests: nil, failedSends: nil, tokens: [nil, nil, nil, nil, nil],
            daemons: [], campaigns: [], attachments: [])
        let html = page(locked, history("com.example.app", samples: 3))
        #expect(html.contains("<dt>results held</dt><dd>–</dd>"))
        #expect(html.contains("<td>active</td><td class=\"number\">–</td>"))
        #expect(html.contains("Not known while a table is locked."))
    }

    @Test func `campaigns are shown with their counts and why they do not move, but not to whom they go`() {
        #expect(!page(overview(), history("t")).contains("Campaigns"))
        let campaign = CampaignProgress(
            number: 7, name: "Mars <b>", environment: "production", topic: "t", state: "running",
            audience: "user: anna", expected: 5000, isAddressed: false, addressed: 4000, waiting: 3900,
            ended: [90, 10, 0, 0, 0, 0, 0], perSecond: 12.6, expectedEnd: nil, createdAt: "", createdBy: "a_sender",
            scheduledAt: nil, startedAt: nil, endedAt: nil, waitsBecause: "no running daemon sends")
        let html = page(overview(campaigns: [campaign]), history("t"))
        #expect(html.contains("<td>7</td><td class=\"name\">Mars &lt;b&gt;</td><td class=\"name\">t</td>"))
        #expect(html.contains("running: no running daemon sends</td>"))
        for count in ["4,000", "3,900", "90", "10", "12"] {
            #expect(html.contains("<td class=\"number\">\(count)</td>"), "\(count)")
        }
        #expect(!html.contains("anna"))
    }

    @Test func `attached tables are shown with what is wrong with them, and nothing if there are none`() {
        #expect(!page(overview(), history("t")).contains("Attached tables"))
        let table = Overview.Attachment(
            table: "public.devices", attachedAt: Self.now, fault: "trigger <a> is disabled", failures: 3)
        let html = page(overview(attachments: [table]), history("t"))
        #expect(
            html.contains("<td class=\"name\">public.devices</td><td class=\"name\">trigger &lt;a&gt; is disabled</td>")
        )
        #expect(html.contains("<td class=\"number\">3</td>"))
    }

    @Test func `what a sender wrote is text, wherever it appears`() {
        let hostile = #"<script>alert("1")</script>'&"# + "\u{202E}\u{7}"
        let text = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&#39;&amp;\u{FFFD}\u{FFFD}"
        let html = page(overview([hostile, "`\(hostile)`"]), history(hostile, reason: hostile), obstacle: hostile)
        #expect(!html.contains("<script"))
        #expect(html.split(separator: text, omittingEmptySubsequences: false).count == 6)
        #expect(!html.contains("\u{202E}"))
    }

    @Test func `no text shows a whole device token`() {
        let token = String(repeating: "0123456789abcdef", count: 4)
        let html = page(overview(["device_id \(token) has many tokens"]), history(token, reason: token.uppercased()))
        #expect(html.contains("device_id 01234567… has"))
        #expect(html.contains("<td class=\"name\">01234567…</td>"))
        #expect(!html.lowercased().contains("0123456789"))
        // A request's id, and a time, are whole.
        #expect(
            HTML.escaped("DEADBEEF-0123-4567-89AB-CDEF01234567 20261122140509")
                == "DEADBEEF-0123-4567-89AB-CDEF01234567 20261122140509")
    }

    @Test func `a topic's share of 410s is that of the tokens that were active before`() {
        #expect(
            page(overview(), history("t")).contains(
                "<td class=\"number\">5</td><td class=\"number\">1</td><td class=\"number\">1</td><td class=\"number\">12.5 %</td>"
            ))
    }

    @Test func `it loads nothing and has no script`() {
        let html = page(overview(), history("com.example.app", samples: 800))
        for reference in ["<script", "src=", "href=", "url(", "http://", "https://", " style=", "onclick"] {
            #expect(!html.contains(reference), "\(reference)")
        }
        #expect(html.contains("<style nonce=\"n0nce\">"))
        let policy = StatusPage.headers(nonce: "n0nce").first { $0.name == "content-security-policy" }?.value
        #expect(policy?.hasPrefix("default-src 'none'; style-src 'nonce-n0nce'; ") == true)
    }

    @Test func `a trend needs a past, and has at most 63 points`() throws {
        #expect(!page(overview(), history("t")).contains("<polyline"))
        let html = page(overview(), history("t", samples: 800))
        let lines = html.components(separatedBy: "points=\"").dropFirst().map { $0.prefix { $0 != "\"" } }
        // Five states within a day, a week and a month.
        #expect(lines.count == 15)
        for line in lines { #expect(2...63 ~= line.split(separator: " ").count) }
        #expect(html.contains("<td>+1,234,511"))
    }

    @Test func `a daemon is live if it reported within 30 seconds and has not stopped`() {
        func daemon(_ name: String, silentFor seconds: Int64, stopped: Bool = false) -> Overview.Daemon {
            let heard = Self.now.advanced(byMicroseconds: -seconds * 1_000_000)
            return .init(
                name: name, version: "0.1.0", startedAt: heard, heartbeatAt: heard, stoppedAt: stopped ? heard : nil,
                sends: name == "a")
        }
        let html = page(
            overview(daemons: [
                daemon("a", silentFor: 29), daemon("b", silentFor: 31), daemon("c", silentFor: 1, stopped: true),
            ]))
        #expect(html.contains("<td class=\"name\">a</td><td>0.1.0</td><td>drains and sends</td>"))
        #expect(html.contains("<td class=\"name\">b</td><td>0.1.0</td><td>silent since "))
        #expect(html.contains("<td class=\"name\">c</td><td>0.1.0</td><td>stopped</td>"))
        #expect(html.contains("<dt>live daemons</dt><dd>1</dd>"))
        #expect(html.contains("<dt>requests in the outbox</dt><dd>10,000 or more</dd>"))
    }

    @Test(
        arguments: [
            ("0", 0), ("999", 999), ("1,000", 1000), ("12,345,678", 12_345_678), ("−1,234", -1234),
        ] as [(String, Int64)])
    func `thousands are separated`(text: String, number: Int64) {
        #expect(Figures.count(number) == text)
    }

    @Test func `small shares and long ages are short`() {
        #expect(Figures.share(1, of: 1_000_000) == "< 0.01 %")
        #expect(Figures.share(5, of: 1000) == "0.5 %")
        #expect(Figures.share(0, of: 0) == "–")
        #expect(Figures.short(3_400_000) == "3.4M")
        #expect(Figures.short(40_000) == "40k")
        #expect(Figures.age(.seconds(7300)) == "2 h")
    }
}
