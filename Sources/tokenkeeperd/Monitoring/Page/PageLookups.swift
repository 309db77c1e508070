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
        let problem: Problem
        let respond: @Sendable (MonitoringPage) -> Void
        /// When the client has got another page.
        let until: ContinuousClock.Instant
    }

    /// The page that says why there is no other, in words.
    typealias Problem = @Sendable (HTTPResponseStatus, String) -> MonitoringPage

    private let waiting = Mutex<[Question]>([])
    private let bell = Wakeup()

    /// The most pages that wait to be read; further clients get 503.
    static let most = 3
    /// How long a page may take in all, from the request on.
    private let limit: Duration

    init(within limit: Duration = .seconds(4)) { self.limit = limit }

    /// Ring it to end `run`.
    var wakeup: Wakeup { bell }

    /// A page that is read; in its place, if it cannot be read in time, one that says so.
    func reply(_ work: @escaping Work, otherwise problem: @escaping Problem) -> MonitoringReply {
        .later(within: limit, otherwise: problem(.serviceUnavailable, Self.tooLong)) { [self] respond in
            ask(work, otherwise: problem, respond)
        }
    }

    private static let tooLong = "PostgreSQL took too long."

    /// - Parameter respond: Called at most once, on any thread.
    private func ask(
        _ work: @escaping Work, otherwise problem: @escaping Problem,
        _ respond: @escaping @Sendable (MonitoringPage) -> Void
    ) {
        let question = Question(work: work, problem: problem, respond: respond, until: .now + limit)
        let isTaken = waiting.withLock { waiting in
            if waiting.count >= Self.most { return false }
            waiting.append(question)
            return true
        }
        if isTaken {
            bell.ring()
        } else {
            respond(problem(.serviceUnavailable, "Too many pages are being read."))
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
            let page = Self.page(question, settings.current.address)
            if !stop.isAsked { question.respond(page) }
        }
    }

    /// Errors are not logged: any client could fill the log, and a statement may have a token.
    private static func page(_ question: Question, _ address: DatabaseAddress) -> MonitoringPage {
        do {
            var connection = try Connection(to: address, writes: false, until: question.until)
            return try question.work(&connection) ?? question.problem(.notFound, "There is none.")
        } catch let error as DatabaseError where error.sqlState == "57014" {
            return question.problem(.serviceUnavailable, tooLong)
        } catch let error as DatabaseError where error.remedy == .retry {
            return question.problem(.serviceUnavailable, "Another session has locked a table.")
        } catch {
            return question.problem(.serviceUnavailable, "PostgreSQL cannot be read: run `tokenkeeperd doctor`.")
        }
    }
}
