import Foundation
import LedgerTestSupport
import Testing

@testable import TokenLedger

/// The rule, as a model of a few lines: for each token the latest registration and the latest instant of each cause.
private struct Model {
    struct Token: Equatable {
        var registered: Int?
        var causes: [String: (at: Int, reason: String)] = [:]

        static func == (left: Token, right: Token) -> Bool { left.told == right.told }

        var told: String {
            let order = ["dead", "suspect", "unregistered"]
            let greatest = order.compactMap { cause in causes[cause].map { (cause, $0) } }.max { $0.1.at < $1.1.at }
            let first = order.first { cause in greatest.map { causes[cause]?.at == $0.1.at } ?? false }
            let suppressed = greatest.map { $0.1.at >= registered ?? .min } ?? false
            let state =
                !suppressed
                ? "active"
                : ["dead": "stale", "suspect": "suspect", "unregistered": "unregistered_by_app"][first ?? ""] ?? ""
            return
                "\(state)|\(registered.map(String.init) ?? "")|\(greatest.map { String($0.1.at) } ?? "")|\(first.flatMap { causes[$0]?.reason } ?? "")"
        }

        mutating func register(_ at: Int) { registered = max(registered ?? .min, at) }

        mutating func declare(_ cause: String, _ at: Int, _ reason: String) {
            if let known = causes[cause], (known.at, known.reason) >= (at, reason) { return }
            causes[cause] = (at, reason)
        }
    }

    var tokens: [String: Token] = [:]
}

@Suite struct `The rule, by a model` {
    /// 200 histories of 500 steps each: registrations, unregistrations and results, late, repeated and out of order.
    /// `MODEL_SEED` repeats one.
    @Test func `random histories end in the state that the model gives`() throws {
        let seed =
            ProcessInfo.processInfo.environment["MODEL_SEED"].flatMap(UInt64.init)
            ?? UInt64.random(in: 0...UInt64(UInt32.max))
        print("model seed \(seed)")
        var chance = SeededChance(seed: seed)
        let database = try TestCluster.shared.database()
        let daemons = try (1...2).map { _ in try DaemonProcess(database.url(), settings: ["sweep.interval=off"]) }
        var owner = try database.connect()
        var model = Model()
        // Seconds; every instant of a history lies in a window of an hour, so that ties are common.
        let start = 1_700_000_000
        let instant = "to_timestamp(%d)"
        for history in 0..<200 {
            var batch: [String] = []
            for _ in 0..<500 {
                let environment = ["production", "sandbox"].randomElement(using: &chance)!
                let topic = ["com.example.\(history)", "com.example.\(history).voip"].randomElement(using: &chance)!
                let hex = String(Int.random(in: 0xA0...0xA9, using: &chance), radix: 16)
                let spelling = Bool.random(using: &chance) ? hex : hex.uppercased()
                let key = "\(environment)|\(topic)|\(hex)"
                let at = start + Int.random(in: 0..<60, using: &chance) * 60
                let moment = String(format: instant, at)
                func result(_ status: Int, _ body: String?, sentAt: String) -> String {
                    let text = body.map { "'\($0)'" } ?? "NULL"
                    return
                        "INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at) VALUES ('\(environment)', '\(topic)', '\(spelling)', \(status), \(text), \(sentAt))"
                }
                var steps: [String]
                switch Int.random(in: 0..<100, using: &chance) {
                case 0..<35:
                    steps = ["SELECT tokenkeeper.register('\(spelling)', '\(topic)', '\(environment)', \(moment))"]
                    model.tokens[key, default: .init()].register(at)
                case 35..<45:
                    steps = ["SELECT tokenkeeper.unregister('\(spelling)', '\(topic)', '\(environment)', \(moment))"]
                    model.tokens[key, default: .init()].declare("unregistered", at, "unregistered by the app")
                case 45..<70:
                    let reason = ["Unregistered", "ExpiredToken"].randomElement(using: &chance)!
                    steps = [result(410, #"{"reason":"\#(reason)","timestamp":\#(at)000}"#, sentAt: "now()")]
                    model.tokens[key, default: .init()].declare("dead", at, reason)
                case 70..<75:
                    steps = [result(410, nil, sentAt: moment)]
                    model.tokens[key, default: .init()].declare("dead", at, "(none given)")
                case 75..<85:
                    let reason = ["BadDeviceToken", "DeviceTokenNotForTopic"].randomElement(using: &chance)!
                    steps = [result(400, #"{"reason":"\#(reason)"}"#, sentAt: moment)]
                    model.tokens[key, default: .init()].declare("suspect", at, reason)
                case 85..<90:
                    steps = [result(200, nil, sentAt: moment)]
                case 90..<95:
                    let (status, reason) = [
                        (400, "BadTopic"), (429, "TooManyRequests"), (503, "Shutdown"), (413, "PayloadTooLarge"),
                    ].randomElement(using: &chance)!
                    steps = [result(status, #"{"reason":"\#(reason)"}"#, sentAt: moment)]
                default:
                    // In seconds: not understood.
                    steps = [result(410, #"{"reason":"Unregistered","timestamp":\#(at)}"#, sentAt: moment)]
                }
                if Int.random(in: 0..<10, using: &chance) == 0 { steps += steps }
                // What comes late: anywhere among the steps of its history.
                for step in steps {
                    batch.insert(step, at: Int.random(in: max(0, batch.count - 60)...batch.count, using: &chance))
                }
            }
            // Several in one transaction, at times, and one that is rolled back leaves nothing.
            while !batch.isEmpty {
                let together = batch.prefix(Int.random(in: 1...25, using: &chance))
                batch.removeFirst(together.count)
                try owner.execute((["BEGIN"] + together + ["COMMIT"]).joined(separator: ";"))
                if Int.random(in: 0..<10, using: &chance) == 0 {
                    try owner.execute(
                        (["BEGIN"]
                            + together.shuffled(using: &chance).map {
                                $0.replacingOccurrences(of: "com.example", with: "com.undone")
                            } + ["ROLLBACK"]).joined(separator: ";"))
                }
            }
        }
        try eventually("the queue is empty") { try owner.scalar("SELECT count(*) FROM tokenkeeper.send_result") == "0" }
        for daemon in daemons { #expect(daemon.stop() == 0) }

        let told = try owner.lines(
            """
            SELECT environment || '|' || topic || '|' || token,
                   state, extract(epoch FROM registered_at)::bigint, extract(epoch FROM invalidated_at)::bigint, reason
            FROM tokenkeeper.token
            """, columns: 5)
        let wanted = model.tokens.map { "\($0.key)|\($0.value.told)" }
        let (surplus, missing) = (Set(told).subtracting(wanted), Set(wanted).subtracting(told))
        #expect(
            surplus.isEmpty && missing.isEmpty,
            "seed \(seed): told \(surplus.sorted().prefix(5)), the model says \(missing.sorted().prefix(5))")
        #expect(told.count > 7000, "the histories touched \(told.count) tokens")
        // The gate says the same as the view.
        #expect(
            try owner.scalar(
                "SELECT count(*) FROM tokenkeeper.token AS t WHERE tokenkeeper.is_sendable(t.token, t.topic, t.environment) <> t.sendable"
            ) == "0")
    }
}
