internal import NIOHTTP1
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Reads what a page needs when somebody asks for it: one page after the other, on a thread of its own, each over a connection that is made for
/// it. Nothing else waits for that, least of all the metrics.
final class PageLookups: Sendable {
    /// - Returns: Nil if there is no such page.
    typealias Work = @Sendable (inout Connection) throws -> MonitoringPage?

    private struct Question {
        let work: Work
        let respond: @Sendable (MonitoringPage) -> Void
        /// When the client's connection is closed.
        let until: ContinuousClock.Instant
    }

    private let waiting = Mutex<[Question]>([])
    private let bell = Wakeup()

    /// The most pages that wait to be read; further clients get 503.
    static let most = 3
    /// The wait for a silent server ends before the client's.
    private static let silence: Duration = .seconds(8)

    /// Ring it to end `run`.
    var wakeup: Wakeup { bell }

    /// - Parameter respond: Called once, on any thread; not if the client is gone.
    func ask(_ work: @escaping Work, _ respond: @escaping @Sendable (MonitoringPage) -> Void) {
        let question = Question(work: work, respond: respond, until: .now + MonitoringServer.longestLife)
        let isTaken = waiting.withLock { waiting in
            if waiting.count >= Self.most { return false }
            waiting.append(question)
            return true
        }
        if isTaken {
            bell.ring()
        } else {
            respond(MonitoringPage(status: .serviceUnavailable, text: "too many pages are being read\n"))
        }
    }

    /// Reads pages until the process shuts down.
    func run(_ settings: LiveConfiguration, until stop: ShutdownRequest) {
        while !stop.isAsked {
            guard let question = waiting.withLock({ $0.isEmpty ? nil : $0.removeFirst() }) else {
                bell.wait(for: .seconds(60))
                continue
            }
            guard .now < question.until else { continue }
            let page = Self.page(question.work, settings.current)
            if !stop.isAsked { question.respond(page) }
        }
    }

    /// Errors are not logged: any client could fill the log, and a statement may have a token.
    private static func page(_ work: Work, _ configuration: Configuration) -> MonitoringPage {
        do {
            var connection = try Connection(to: configuration.address, writes: false, silence: silence)
            return try work(&connection) ?? MonitoringPage(status: .notFound, text: "there is none\n")
        } catch let error as DatabaseError where error.sqlState == "57014" {
            return MonitoringPage(status: .serviceUnavailable, text: "PostgreSQL took too long; try again later\n")
        } catch let error as DatabaseError where error.remedy == .retry {
            return MonitoringPage(status: .serviceUnavailable, text: "another session has locked a table; try again\n")
        } catch {
            return MonitoringPage(
                status: .serviceUnavailable, text: "PostgreSQL cannot be read; run `tokenkeeperd doctor`\n")
        }
    }
}
