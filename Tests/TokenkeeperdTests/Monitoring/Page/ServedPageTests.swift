import Foundation
import LedgerTestSupport
import NIOCore
import Synchronization
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

@Suite(.ownThread) struct `A page that cannot be read` {
    private final class Received: Sendable {
        private let taken = Mutex<MonitoringPage?>(nil)
        var page: MonitoringPage? { taken.withLock { $0 } }
        func take(_ page: MonitoringPage) { taken.withLock { $0 = page } }
    }

    @Test(arguments: ["/topic/production:t", "/campaign/1", "/find"])
    func `says why, and is loaded again unless it is a form`(path: String) throws {
        // Nothing listens there.
        let address = try DatabaseAddress("host=127.0.0.1 port=1 user=x dbname=x")
        let settings = LiveConfiguration(Configuration(values: [:], address: address))
        let (lookups, stop, received) = (PageLookups(), ShutdownRequest(), Received())
        stop.alsoRing(lookups.wakeup)
        defer { stop.ask() }
        Thread.detachNewThread { lookups.run(settings, until: stop) }
        let request = MonitoringRequest(
            path: path, host: nil, isLocal: true, form: path == "/find" ? "q=aabbccdd" : nil)
        let reply = ServedPage(.loopback, OverviewCache(), lookups, settings).reply(to: request, ServiceState())
        guard case .later(_, let late, let start) = reply else { throw TestFailure("it is there at once") }
        start { received.take($0) }
        try eventually("it is there") { received.page != nil }
        for (page, words) in [
            (late, "PostgreSQL took too long."),
            (try #require(received.page), "PostgreSQL cannot be read: run <code>tokenkeeperd doctor</code>."),
        ] {
            let text = String(buffer: page.body)
            #expect(page.status == .serviceUnavailable && page.type.hasPrefix("text/html"))
            #expect(text.contains("<p>\(words)</p>"), "\(text)")
            #expect(text.contains("http-equiv=\"refresh\"") == (path != "/find"))
            #expect(text.contains("<form") == (path == "/find"))
        }
    }
}
