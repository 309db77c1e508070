internal import NIOHTTP1
internal import TokenLedger
internal import TokenModel

/// The status page as it is served to those who may see it. The first page is rendered at most once a second, from what was read before. The
/// others are read when somebody asks for them.
final class ServedPage: Sendable {
    private let access: PageAccess
    private let overviews: OverviewCache
    private let lookups: PageLookups
    private let settings: LiveConfiguration
    private let rendered = PageCache()

    /// How long a statement for a page may take, if the page has so much time left.
    private static let limit: Duration = .seconds(2)

    init(_ access: PageAccess, _ overviews: OverviewCache, _ lookups: PageLookups, _ settings: LiveConfiguration) {
        self.access = access
        self.overviews = overviews
        self.lookups = lookups
        self.settings = settings
    }

    /// - Returns: Nil if the page is off, or there is no such page.
    func reply(to request: MonitoringRequest, _ state: ServiceState) -> MonitoringReply? {
        guard access != .off, let address = PageAddress(path: request.path) else { return nil }
        guard access.admits(isLocal: request.isLocal) else {
            return .now(
                MonitoringPage(status: .forbidden, text: "this page is only for this machine; see metrics.page\n"))
        }
        switch address {
        case .overview: return .now(rendered.page { overview(state) })
        case .topic(let topic, let environment):
            return read(address) { try Self.topic(topic, environment, address, &$0) }
        case .campaign(let number): return read(address) { try Self.campaign(number, address, &$0) }
        case .find:
            let text = request.form.map { Self.trimmed(PageAddress.field("q", of: $0) ?? "") } ?? ""
            let retention = settings.current.values["sweep.event_retention"]?.value ?? "its default"
            if text.isEmpty { return .now(Self.found(.nothingYet, retention)) }
            return read(address) { try Self.find(text, retention, &$0) }
        }
    }

    private func overview(_ state: ServiceState) -> MonitoringPage {
        let contents = overviews.contents
        let page = StatusPage(
            overview: contents.overview, history: contents.history, usual: contents.usual,
            daemonStatus: state.status, obstacles: state.obstacles, isOld: contents.isOld(), now: .now)
        return Self.page(page.html)
    }

    private func read(_ address: PageAddress, _ work: @escaping PageLookups.Work) -> MonitoringReply {
        lookups.reply(work) { status, words in
            // A refresh of the form would lose what was typed.
            let period = address == .find || status == .notFound ? nil : 15
            let frame = PageFrame(address: address, title: "tokenkeeperd", now: .now, period: period)
            let form: HTML = address == .find ? "<section><h2>Find</h2>\(frame.search())</section>\n" : ""
            return Self.page(status: status) {
                frame.html(nonce: $0, "\(form)<section class=\"attention\"><p>\(HTML.message(words))</p></section>")
            }
        }
    }

    private static func topic(
        _ topic: String, _ environment: String, _ address: PageAddress, _ connection: inout Connection
    ) throws -> MonitoringPage? {
        guard let detail = try TopicDetail.find(topic, environment: environment, within: limit, on: &connection)
        else { return nil }
        let frame = PageFrame(address: address, title: "\(topic) – tokenkeeperd", now: .now, period: 60)
        return page(TopicPage(detail: detail, frame: frame).html)
    }

    private static func campaign(
        _ number: Int64, _ address: PageAddress, _ connection: inout Connection
    ) throws -> MonitoringPage? {
        guard let (campaign, failures) = try CampaignProgress.detail(number, within: limit, on: &connection)
        else { return nil }
        let frame = PageFrame(address: address, title: "Campaign \(number) – tokenkeeperd", now: .now)
        return page(CampaignPage(campaign: campaign, failures: failures, frame: frame).html)
    }

    private static func find(
        _ text: String, _ retention: String, _ connection: inout Connection
    ) throws -> MonitoringPage? {
        if let digits = TokenDigits(text) {
            let answer = try TokenLookup(.token(digits)).answer(within: limit, on: &connection)
            return found(.token(digits, answer), retention)
        }
        let topics = try TopicDetail.names(like: text, FindPage.most, within: limit, on: &connection)
        return found(.topics(topics, like: text), retention)
    }

    private static func found(_ found: FindPage.Found, _ retention: String) -> MonitoringPage {
        page(FindPage(found: found, retention: retention, now: .now).html)
    }

    private static func page(
        status: HTTPResponseStatus = .ok, _ html: (_ nonce: String) -> HTML
    ) -> MonitoringPage {
        var random = SystemRandomNumberGenerator()
        let nonce = String(random.next(), radix: 36) + String(random.next(), radix: 36)
        return MonitoringPage(
            status: status, type: "text/html; charset=utf-8", headers: PageFrame.headers(nonce: nonce),
            text: html(nonce).text)
    }

    private static func trimmed(_ text: String) -> String {
        let text = text.drop { $0.isWhitespace }
        return String(
            text.prefix(
                (text.lastIndex { !$0.isWhitespace }).map { text.distance(from: text.startIndex, to: $0) + 1 } ?? 0))
    }
}
