internal import NIOHTTP1
internal import TokenLedger
internal import TokenModel

/// The status page as it is served: rendered at most once a second, for those who may see it.
final class ServedPage: Sendable {
    private let access: PageAccess
    private let overviews: OverviewCache
    private let rendered = PageCache()

    init(_ access: PageAccess, _ overviews: OverviewCache) {
        self.access = access
        self.overviews = overviews
    }

    /// - Returns: Nil if the page is off.
    func response(to request: MonitoringRequest, _ state: ServiceState) -> MonitoringPage? {
        if access == .off { return nil }
        guard access.admits(isLocal: request.isLocal) else {
            return MonitoringPage(
                status: .forbidden,
                text: "this page is only for this machine; see metrics.page\n")
        }
        return rendered.page { render(state) }
    }

    private func render(_ state: ServiceState) -> MonitoringPage {
        var random = SystemRandomNumberGenerator()
        let nonce = String(random.next(), radix: 36) + String(random.next(), radix: 36)
        let contents = overviews.contents
        let page = StatusPage(
            overview: contents.overview, history: contents.history, daemonStatus: state.status,
            obstacles: state.obstacles, isOld: contents.isOld(), now: .now)
        return MonitoringPage(
            type: "text/html; charset=utf-8", headers: StatusPage.headers(nonce: nonce),
            text: page.html(nonce: nonce).text)
    }
}
