import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TokenLedger

/// What happened, written outside the database: what applications were told is committed, and what the fake APNs responded.
final class LifeJournal: Sendable {
    /// Tokens of these topics get registrations, logouts and results; of the other one, pushes.
    static let topics = ["com.example.a", "com.example.b"]
    static let attached = "com.example.attached"
    static let sent = "com.example.sent"
    /// The tokens of the topic `sent`. From the first dead one on, they are dead for APNs.
    static let tokens = 300
    static let firstDead = 250
    /// In seconds since 1970: when the tokens of `sent` were registered, and when the dead ones died.
    static let registered = Int(Date.now.timeIntervalSince1970) - 20 * 86_400
    static let died = registered + 100_000

    private struct State {
        var model = LedgerModel()
        /// Results that applications have queued, and tries whose outcome they do not know.
        var results = (committed: 0, doubtful: 0)
        /// The token of each request, by `apns-id`.
        var requests: [String: String] = [:]
        var doubtfulRequests: Set<String> = []
        /// How often APNs accepted each request.
        var accepted: [String: Int] = [:]
        /// The requests to which APNs responded with a 410.
        var gone: Set<String> = []
    }

    private let state = Mutex(State())

    func apply(_ change: (inout LedgerModel) -> Void) { state.withLock { change(&$0.model) } }
    func result(isCertain: Bool) {
        state.withLock { if isCertain { $0.results.committed += 1 } else { $0.results.doubtful += 1 } }
    }
    func request(_ id: String, to token: String, isCertain: Bool) {
        state.withLock {
            $0.requests[id] = token
            if !isCertain { $0.doubtfulRequests.insert(id) }
        }
    }
    func note(_ exchange: FakeExchange) {
        let id = exchange.request.apnsID.lowercased()
        state.withLock { state in
            if exchange.outcome == FakeOutcome(200) { state.accepted[id, default: 0] += 1 }
            if exchange.outcome.status == 410 { state.gone.insert(id) }
        }
    }

    static func isDead(_ token: String) -> Bool { token >= SendingStage.token(firstDead) }

    /// What contradicts the journal. Call it when all queues are empty.
    func contradictions(on connection: inout Connection) throws -> [String] {
        let state = state.withLock { $0 }
        var found: [String] = []
        let ledger = Set(try connection.lines(LedgerModel.ledger, columns: LedgerModel.columns))
            .filter { !$0.contains("|\(Self.sent)|") && !$0.contains("|com.example.probe|") }
        let wanted = state.model.told()
        for line in ledger.subtracting(wanted).sorted().prefix(5) { found.append("the ledger: \(line)") }
        for line in wanted.subtracting(ledger).sorted().prefix(5) { found.append("the journal: \(line)") }
        for line in try connection.lines(LedgerModel.wrongCounts, columns: 5).prefix(5) {
            found.append("count: \(line)")
        }

        let counted =
            Int(
                try connection.scalar(
                    "SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat WHERE topic IN ('\(Self.topics.joined(separator: "', '"))')"
                )
                    ?? "") ?? 0
        if !(state.results.committed...state.results.committed + state.results.doubtful).contains(counted) {
            found.append("\(counted) results are counted, and \(state.results) were queued")
        }
        let failed = Set(
            try connection.lines("SELECT apns_id::text || ' ' || error FROM tokenkeeper.failed_send", columns: 1))
        let failedIDs = Set(failed.compactMap { $0.split(separator: " ").first.map(String.init) })
        let suppressed = Set(try connection.lines("SELECT apns_id::text FROM tokenkeeper.suppressed_send", columns: 1))
        for (id, token) in state.requests {
            let accepted = state.accepted[id, default: 0]
            if accepted > 2 { found.append("\(id) was pushed \(accepted) times") }
            let ended = accepted > 0 || state.gone.contains(id) || failedIDs.contains(id) || suppressed.contains(id)
            if !ended, !state.doubtfulRequests.contains(id) { found.append("\(id) to \(token) was lost") }
            if suppressed.contains(id), !Self.isDead(token) {
                found.append("\(id) to the live \(token) was suppressed")
            }
        }
        for line in failed where !line.contains("interrupted") { found.append("failed: \(line)") }
        let states = try connection.lines(
            "SELECT token, state FROM tokenkeeper.token WHERE topic = '\(Self.sent)'", columns: 2)
        let recorded = Set(state.gone.subtracting(failedIDs).compactMap { state.requests[$0] })
        for line in states {
            let parts = line.split(separator: "|").map(String.init)
            let isStale = parts[1] == "stale"
            if isStale != Self.isDead(parts[0]), isStale || recorded.contains(parts[0]) {
                found.append("\(parts[0]) is \(parts[1])")
            }
        }
        if states.count != Self.tokens { found.append("\(states.count) of \(Self.tokens) tokens are left") }
        return Array(found.prefix(30))
    }

    var summary: String {
        state.withLock {
            "\($0.results) results, \($0.requests.count) requests, \($0.accepted.values.count { $0 > 1 }) pushed twice, \($0.gone.count) 410s"
        }
    }
}
