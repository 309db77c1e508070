internal import Synchronization

/// Keeps a page for a second: however many clients ask for it, it is rendered at most once in that time.
final class PageCache: Sendable {
    private let last = Mutex<(page: MonitoringPage, until: ContinuousClock.Instant)?>(nil)

    static let keptFor: Duration = .seconds(1)

    /// - Parameter render: Called if the last page is too old. Must not wait for anything.
    func page(at now: ContinuousClock.Instant = .now, _ render: () -> MonitoringPage) -> MonitoringPage {
        last.withLock { last in
            if let last, now < last.until { return last.page }
            let page = render()
            last = (page, now + Self.keptFor)
            return page
        }
    }
}
