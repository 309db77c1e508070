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
            at: Self.now,
            status: status(
                [
                    "queue_depth": "0", "rejected": "0", "held": "0", "requests": "10250", "campaign_requests": "250",
                    "failed_sends": "0", "tokens_active": "1234567", "tokens_stale": "89", "tokens_suspect": "0",
                    "tokens_superseded": "0", "tokens_unregistered_by_app": "0", "registration_queue_depth": "1234",
                    "registrations_per_second": "812.4", "queue_as_of": "2027-01-15 07:59:58 UTC",
                    "requests_as_of": "2027-01-14 23:00:01 UTC", "as_of": "2027-01-15 08:00:00 UTC",
                ], warnings, critical: critical), daemons: daemons, campaigns: campaigns, attachments: attachments)
    }

    private func status(
        _ values: [String: String], _ warnings: [String] = [], critical: Int = 0
    ) -> StatusReport {
        StatusReport(
            json: "{}", fields: values.map { .init(name: $0.key, kind: .number, value: $0.value) }, warnings: warnings,
            criticalWarnings: Array(warnings.prefix(critical)))
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
        _ overview: Overview?, _ history: OverviewHistory? = nil, usual: UsualShare? = nil, obstacle: String? = nil,
        isOld: Bool = false
    ) -> String {
        StatusPage(
            overview: overview, history: history, usual: usual, daemonStatus: "starting",
            obstacles: [obstacle].compactMap { $0 },
            isOld: isOld, now: Self.now
        ).html(nonce: "n0nce").text
    }

    @Test func `a text of others becomes no command`() {
        let shown = page(
            overview([
                "the guard of com.`rm -rf ~`.app tripped; see `tokenkeeperd held list`",
                "x`y: see `tokenkeeperd held list`", "`tokenkeeperd sweep; rm x`", "`tokenkeeperd sweep $(rm)`",
                "`tokenkeeperd sweep \"$HOME\"`", "`SELECT tokenkeeper.resume_sending('a''b', 'production')`",
                "`SELECT tokenkeeper.detach('a'); DROP TABLE x`", "`SELECT tokenkeeper.detach(x())`", "`DROP TABLE x`",
                "`SELECT tokenkeeper.detach('a\\')`", "if that is a mistake: `tokenkeeperd reinstate --topic 'a$b'`",
            ]))
        let commands = shown.matches(of: #/<code>(.*?)</code>/#).map { String($0.output.1) }
        #expect(
            commands == [
                "tokenkeeperd held list",
                "SELECT tokenkeeper.resume_sending(&#39;a&#39;&#39;b&#39;, &#39;production&#39;)",
                "tokenkeeperd reinstate --topic &#39;a$b&#39;",
            ])
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
            at: Self.now, status: status(["queue_depth": "7"], ["a table is locked"]), daemons: [], campaigns: [],
            attachments: [])
        let html = page(locked, history("com.example.app", samples: 3))
        #expect(html.contains("<dt>results held</dt><dd>–</dd>"))
        #expect(html.contains(cell("–", "Now", "number")))
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
        #expect(
            html.contains("<span class=\"state running\">running</span> <a href=\"campaign/7\">7 Mars &lt;b&gt;</a>"))
        for words in ["2 % of about 5,000", "90 accepted", "10 stale", "no running daemon sends"] {
            #expect(html.contains(words), "\(words)")
        }
        #expect(!html.contains("anna") && !html.contains("per second</span>"))
        var moving = campaign
        (moving.waitsBecause, moving.expectedEnd) = (nil, "2027-01-15 09:00:00 UTC")
        let page = page(overview(campaigns: [moving]), history("t"))
        #expect(page.contains("<span>12 per second</span> <span>ends at about 2027-01-15 09:00:00 UTC</span>"))
        let own = CampaignPage(
            campaign: campaign, failures: [("<too long>", 3)],
            frame: PageFrame(address: .campaign(7), title: "", now: Self.now)
        ).html(nonce: "n").text
        #expect(own.contains(cell("one user", "Value")) && !own.contains("anna"))
        #expect(own.contains(cell("&lt;too long&gt;", "Error") + cell("3", "Requests", "number")))
        #expect(own.contains("<a href=\"../\">tokenkeeperd</a>"))
    }

    private func cell(_ value: String, _ column: String, _ kind: String = "name") -> String {
        "<td class=\"\(kind)\" data-label=\"\(column)\"><span>\(value)</span></td>"
    }

    @Test func `attached tables are shown with what is wrong with them, and nothing if there are none`() {
        #expect(!page(overview(), history("t")).contains("Attached tables"))
        let table = Overview.Attachment(
            table: "public.devices", attachedAt: Self.now, fault: "trigger <a> is disabled", failures: 3)
        let html = page(overview(attachments: [table]), history("t"))
        #expect(
            html.contains(cell("public.devices", "Table") + cell("trigger &lt;a&gt; is disabled", "State"))
        )
        #expect(html.contains(cell("3", "Failed changes", "number")))
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
        #expect(html.contains(cell("01234567…", "Topic")), "and no link, which would have the whole token")
        #expect(!html.lowercased().contains("0123456789"))
        // A request's id, and a time, are whole.
        #expect(
            HTML.escaped("DEADBEEF-0123-4567-89AB-CDEF01234567 20261122140509")
                == "DEADBEEF-0123-4567-89AB-CDEF01234567 20261122140509")
    }

    @Test func `a topic's share of 410s is that of the tokens that were active before`() {
        #expect(
            page(overview(), history("t")).contains(
                cell("1", "Suppressed", "number") + cell("1", "New 410s, 24 h", "number")
                    + cell("12.5 %", "Share", "number")))
    }

    @Test func `each number has its own time`() {
        let html = page(overview())
        for number in [
            "<dt>registrations queued</dt><dd>1,234</dd><dd class=\"asof\">as of 07:59:58</dd>",
            "<dt>registrations per second</dt><dd>812</dd><dd class=\"asof\">as of 07:59:58</dd>",
            "<dt>requests waiting</dt><dd>10,250 or more</dd><dd class=\"asof\">as of 2027-01-14 23:00:01</dd>",
            "<dt>results held</dt><dd>0</dd><dd class=\"asof\">as of 08:00:00</dd>",
        ] { #expect(html.contains(number), "\(number)") }
    }

    @Test func `the share of 410s is compared with what is usual, once that is known`() {
        func legend(_ usual: UsualShare?) -> String { page(overview(), history("t"), usual: usual) }
        #expect(legend(nil).contains("The usual share is not known"))
        #expect(
            legend(.init(band: nil, since: Self.now)).contains(
                "no results before 2027-01-15 08:00:00 UTC, so nothing is"))
        let html = legend(.init(band: 0.004...0.05, since: nil))
        #expect(html.contains("usual: 0.4 % to 5 %"))
        // From 1 of 20 results on, which is 5 %; hours with fewer results say nothing.
        #expect(html.components(separatedBy: "<rect class=\"high\"").count == 1)
        #expect(
            legend(.init(band: 0.004...0.045, since: nil)).components(separatedBy: "<rect class=\"high\"").count == 4)
    }

    @Test func `it loads nothing and has no script`() {
        let html = page(overview(), history("com.example.app", samples: 800))
        for reference in ["<script", "src=", "url(", "http://", "https://", "href=\"/", " style=", "onclick"] {
            #expect(!html.contains(reference), "\(reference)")
        }
        #expect(html.contains("<style nonce=\"n0nce\">"))
        let policy = PageFrame.headers(nonce: "n0nce").first { $0.name == "content-security-policy" }?.value
        #expect(policy?.hasPrefix("default-src 'none'; style-src 'nonce-n0nce'; ") == true)
    }

    @Test func `a trend needs a past, and has at most 63 points`() throws {
        let first = page(overview(), history("t"))
        #expect(!first.contains("<polyline") && first.contains("No history yet."))
        let html = page(overview(), history("t", samples: 800))
        let lines = html.components(separatedBy: "points=\"").dropFirst().map { $0.prefix { $0 != "\"" } }
        // Five states within a day, a week and a month.
        #expect(lines.count == 15)
        for line in lines { #expect(2...63 ~= line.split(separator: " ").count) }
        #expect(html.contains("<span>+1,234,511<svg"))
        // A month has not been counted yet.
        let young = page(overview(), history("t", samples: 30))
        #expect(young.components(separatedBy: "<polyline").count == 11, "30 hours of a month would be a dot")
        #expect(
            young.contains("No history before 2027-01-14 02:00:00 UTC.")
                && young.contains("since 2027-01-14 02:00</span>"))
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
        #expect(html.contains(cell("a", "Daemon") + cell("0.1.0", "Version") + cell("drains and sends", "State")))
        #expect(
            html.contains(
                cell("b", "Daemon") + cell("0.1.0", "Version")
                    + "<td class=\"name\" data-label=\"State\"><span>silent since "))
        #expect(html.contains(cell("c", "Daemon") + cell("0.1.0", "Version") + cell("stopped", "State")))
        #expect(html.contains("<dt>live daemons</dt><dd>1</dd>"))
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
        #expect(Figures.short(3_000_000) == "3M" && Figures.percent(0.25) == "25 %" && Figures.rate(0.44) == "0.4")
        #expect(Figures.age(.seconds(7300)) == "2 h")
    }
}
