import Foundation
import LedgerTestSupport
import Synchronization

/// Applications and senders: they register, log out, attach, move devices, forget, report and queue pushes, through the proxy. What fails is
/// repeated until it succeeds, as a client of Postgres has to do it.
final class LifeApplications: Sendable {
    private let url: @Sendable (String) -> String
    private let journal: LifeJournal
    private let isOver = Atomic(false)
    private let running = Atomic(0)
    private let failure = Mutex<String?>(nil)
    private let sessions = IdleSessions()

    /// - Parameter url: Of a login.
    init(_ journal: LifeJournal, _ seed: UInt64, url: @escaping @Sendable (String) -> String) {
        self.url = url
        self.journal = journal
        for number in 0..<2 {
            running.add(1, ordering: .relaxed)
            Thread.detachNewThread { [self] in
                defer { running.subtract(1, ordering: .relaxed) }
                var chance = SeededChance(seed: seed &+ UInt64(number))
                var forgotten = 0
                while !isOver.load(ordering: .relaxed) {
                    act(number, &forgotten, &chance)
                    usleep(4_000)
                }
            }
        }
    }

    /// Ends them; what is not certain is repeated before.
    func end() throws {
        isOver.store(true, ordering: .relaxed)
        try eventually("the applications have come to an end", within: 120) { running.load(ordering: .relaxed) == 0 }
        if let failure = failure.withLock({ $0 }) { throw TestFailure(failure) }
    }

    private func run(_ sql: String, as user: String) throws {
        try sessions.run(sql, user: user, url: url(user))
    }

    /// Repeats it until it has succeeded: twice is as once.
    private func insist(_ sql: String, as user: String = "a_app", _ apply: (inout LedgerModel) -> Void) {
        for _ in 1...2_000 {
            do {
                try run(sql, as: user)
                journal.apply(apply)
                return
            } catch {
                usleep(50_000)
            }
        }
        failure.withLock { $0 = "never succeeded: \(sql)" }
    }

    private func act(_ number: Int, _ forgotten: inout Int, _ chance: inout SeededChance) {
        let topic = LifeJournal.topics.randomElement(using: &chance)!
        let token = SendingStage.token(1_000 + Int.random(in: 0..<200, using: &chance))
        let key = LedgerModel.Key("production", topic, token)
        let at = LifeJournal.registered + Int.random(in: 0..<500_000, using: &chance)
        let device = Int.random(in: 0..<3, using: &chance) == 0 ? nil : "d\(Int.random(in: 0..<60, using: &chance))"
        let user = Int.random(in: 0..<3, using: &chance) == 0 ? "u\(Int.random(in: 0..<40, using: &chance))" : nil
        func literal(_ text: String?) -> String { text.map { "'\($0)'" } ?? "NULL" }
        switch Int.random(in: 0..<20, using: &chance) {
        case 0..<4:
            insist(
                "SELECT tokenkeeper.register('\(token)', '\(topic)', 'production', to_timestamp(\(at)), \(literal(device)), NULL, \(literal(user)))"
            ) { $0.register(key, at, device: device, user: user) }
        case 4..<7:
            insist(
                """
                INSERT INTO tokenkeeper.registration (topic, token, registered_at, device_id, user_id)
                VALUES ('\(topic)', '\(token)', to_timestamp(\(at)), \(literal(device)), \(literal(user)))
                """
            ) { $0.register(key, at, device: device, user: user) }
        case 7:
            insist("SELECT tokenkeeper.unregister('\(token)', '\(topic)', 'production', to_timestamp(\(at)))") {
                $0.invalidate(key, .unregisteredByApp, at, "unregistered by the app")
            }
        case 8: attach(&chance)
        case 9: forget(number, &forgotten)
        case 10..<14: report(key, at, &chance)
        default: push(&chance)
        }
    }

    private func attach(_ chance: inout SeededChance) {
        let number = Int.random(in: 0..<50, using: &chance)
        let token = SendingStage.token(3_000 + number)
        let at = LifeJournal.registered + Int.random(in: 0..<500_000, using: &chance)
        insist(
            """
            INSERT INTO app.devices VALUES (\(number), '\(token)', to_timestamp(\(at)))
            ON CONFLICT (id) DO UPDATE SET last_seen = greatest(devices.last_seen, excluded.last_seen)
            """
        ) { $0.register(LedgerModel.Key("production", LifeJournal.attached, token), at) }
    }

    /// A token of its own, which nobody names afterwards.
    private func forget(_ number: Int, _ forgotten: inout Int) {
        forgotten += 1
        let token = SendingStage.token(100_000 * (number + 1) + forgotten)
        let topic = LifeJournal.topics[0]
        insist("SELECT tokenkeeper.register('\(token)', '\(topic)', user_id => 'gone')") { _ in }
        insist(
            "INSERT INTO tokenkeeper.registration (topic, token) VALUES ('\(topic)', '\(token)')"
        ) { _ in }
        insist("SELECT tokenkeeper.forget('\(token)')") { _ in }
    }

    private func report(_ key: LedgerModel.Key, _ at: Int, _ chance: inout SeededChance) {
        let (status, body, cause): (Int, String, LedgerModel.Cause?) =
            switch Int.random(in: 0..<4, using: &chance) {
            case 0: (410, #"'{"reason":"Unregistered","timestamp":\#(at)000}'"#, .stale)
            case 1: (400, #"'{"reason":"BadDeviceToken"}'"#, .suspect)
            default: (200, "NULL", nil)
            }
        let reason = cause == .stale ? "Unregistered" : "BadDeviceToken"
        for _ in 1...2_000 {
            do {
                try run(
                    """
                    INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
                    VALUES ('\(key.topic)', '\(key.token)', \(status), \(body), to_timestamp(\(at)))
                    """, as: "a_sender")
                journal.result(isCertain: true)
                if let cause { journal.apply { $0.invalidate(key, cause, at, reason) } }
                return
            } catch {
                // It may be there, and is counted again then. The facts are the same.
                journal.result(isCertain: false)
                usleep(50_000)
            }
        }
    }

    /// Never repeated: the device might get it twice.
    private func push(_ chance: inout SeededChance) {
        let token = SendingStage.token(Int.random(in: 1...LifeJournal.tokens, using: &chance))
        let id = UUID().uuidString.lowercased()
        do {
            try run(
                """
                INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id)
                VALUES ('\(LifeJournal.sent)', '\(token)', '{"aps":{"alert":"Hello"}}', '\(id)')
                """, as: "a_sender")
            journal.request(id, to: token, isCertain: true)
        } catch {
            journal.request(id, to: token, isCertain: false)
        }
    }
}
