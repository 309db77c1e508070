internal import Logging
internal import NIOHTTP1
internal import Synchronization

/// Start here: what the daemon serves over HTTP to those who watch it.
enum Monitoring {
    /// Begins to serve, if an address is configured. Without it, the daemon does all its other work: an address in use is logged.
    static func serve(
        _ address: ListenAddress?, as hosts: HostNames, _ metrics: ProcessMetrics, _ page: ServedPage,
        _ settings: LiveConfiguration,
        _ report: ServiceNotifier, _ logger: Logger
    ) -> MonitoringServer? {
        guard let address else { return nil }
        let cache = PageCache()
        let isRefusalLogged = Atomic(false)
        do {
            let server = try MonitoringServer(address, forms: [PageAddress.find.path]) { request in
                guard hosts.admit(request.host) else {
                    // Only once, because anybody who can connect could fill the log.
                    if !isRefusalLogged.exchange(true, ordering: .relaxed) {
                        logger.warning(
                            "refuses requests under a name that is not in metrics.hosts",
                            metadata: ["name": "\(request.host?.prefix(255) ?? "")"])
                    }
                    return .now(strange)
                }
                return switch request.path {
                case "/metrics":
                    .now(
                        cache.page {
                            let interval = settings.current.sweepInterval
                            return MonitoringPage(
                                type: MetricsText.contentType,
                                text: metrics.text(report.current, sweepInterval: interval))
                        })
                case "/live":
                    .now(check(report.current.isAlive(at: .now), otherwise: "a worker has not reported in time"))
                case "/ready": .now(check(report.current.isReady, otherwise: report.current.readyStatus))
                default: page.reply(to: request, report.current)
                }
            }
            logger.notice("serves metrics", metadata: ["address": "\(address)"])
            return server
        } catch {
            logger.error(
                "metrics cannot be served; everything else works",
                metadata: ["address": "\(address)", "error": "\(error)"])
            return nil
        }
    }

    private static let strange = MonitoringPage(
        status: .forbidden, isAlwaysServed: true,
        text: "use an IP address, a name without a dot, this machine's name, or a name in metrics.hosts\n")

    private static func check(_ isFine: Bool, otherwise words: String) -> MonitoringPage {
        isFine
            ? MonitoringPage(isAlwaysServed: true, text: "ok\n")
            : MonitoringPage(status: .serviceUnavailable, isAlwaysServed: true, text: words + "\n")
    }
}
