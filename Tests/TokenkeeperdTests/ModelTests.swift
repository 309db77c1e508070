import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

/// A registration, unregistration or result, as SQL and for the model.
private struct Step {
    var sql: String
    var apply: (inout LedgerModel) -> Void
}

@Suite(.ownThread) struct `The rule, compared with a model` {
    /// In the full soak, 200 histories of 500 steps each: registrations with and without devices, logouts and results, by a call or through
    /// a queue, late, repeated and out of order; suspects and logouts that are held and released, undone windows of suspects, of 410s and of logouts,
    /// forgotten tokens; and daemons that are killed. `TEST_SEED` repeats a run.
    @Test func `random histories end in the state that the model gives`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let database = try TestCluster.ofErasures.database()
        // One of them holds 410s, the other does not: what it has held is released in the end.
        let settings = ["1%", "100%"].map { ["sweep.interval=off", "guard.hold_stale_share=\($0)"] }
        var daemons = try settings.map { try DaemonProcess(database.url(), settings: $0) }
        var kills = 0
        var owner = try database.connect()
        // Both pass the guard.
        try owner.execute(
            "INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('import', 'a file'), ('attachment', 'a table')"
        )
        var model = LedgerModel()
        var heldTopics: [String] = []
        let histories = Soak.size(50, whole: 200)
        for history in 0..<histories {
            let topics = [
                "com.example.\(history)", "com.example.\(history).voip",
                "com.example.\(history).push-type.liveactivity",
            ]
            heldTopics += topics
            if history.isMultiple(of: 2) {
                // Here the guard trips at the first or second token; elsewhere at the sixth.
                for topic in topics {
                    try owner.execute(
                        """
                        INSERT INTO tokenkeeper.topic_policy (environment, topic, guard_allowance, guard_max_share)
                        VALUES ('production', '\(topic)', 0, 0), ('sandbox', '\(topic)', 1, 0)
                        """)
                }
            }
            var batch: [Step] = []
            for _ in 0..<500 {
                var steps = [Self.step(history, topics, &chance)]
                if Int.random(in: 0..<10, using: &chance) == 0 { steps += steps }
                // Late steps: anywhere in their history.
                for step in steps {
                    batch.insert(step, at: Int.random(in: max(0, batch.count - 60)...batch.count, using: &chance))
                }
            }
            // All instants are in the past. After a forget, the queues drop such reports, so a history leaves them out.
            var forgotten: Set<String> = []
            batch = batch.filter { step in
                let sql = step.sql.lowercased()
                if forgotten.contains(where: sql.contains) { return false }
                if let forget = sql.firstMatch(of: /forget\('([0-9a-f]+)'\)/) { forgotten.insert(String(forget.1)) }
                return true
            }
            // Sometimes several steps in one transaction. A transaction that is rolled back leaves nothing.
            while !batch.isEmpty {
                let together = batch.prefix(Int.random(in: 1...25, using: &chance))
                batch.removeFirst(together.count)
                try owner.execute((["BEGIN"] + together.map(\.sql) + ["COMMIT"]).joined(separator: ";"))
                for step in together { step.apply(&model) }
                if Int.random(in: 0..<150, using: &chance) == 0 {
                    kills += 1
                    let victim = Int.random(in: 0..<daemons.count, using: &chance)
                    daemons[victim].signal(SIGKILL)
                    #expect(daemons[victim].wait() == -SIGKILL)
                    daemons[victim] = try DaemonProcess(database.url(), settings: settings[victim])
                }
                if Int.random(in: 0..<10, using: &chance) == 0 {
                    try owner.execute(
                        (["BEGIN"]
                            + together.shuffled(using: &chance).map {
                                $0.sql.replacingOccurrences(of: "com.example", with: "com.undone")
                            } + ["ROLLBACK"]).joined(separator: ";"))
                }
            }
        }
        #expect(kills > 0, "seed \(seed)")
        let isEmpty =
            "SELECT count(*) FROM (SELECT FROM tokenkeeper.send_result UNION ALL SELECT FROM tokenkeeper.registration LIMIT 1) AS r"
        try eventually("the queues are empty") { try owner.scalar(isEmpty) == "0" }
        // The daemons have undone the reinstated windows in their own steps.
        let undoing = "SELECT count(*) FROM tokenkeeper.reinstatement WHERE finished_at IS NULL"
        try eventually("all windows are undone") { try owner.scalar(undoing) == "0" }
        let held = Int(try owner.scalar("SELECT count(*) FROM tokenkeeper.held_result") ?? "") ?? 0
        #expect(held > histories / 2, "seed \(seed): the guard held \(held)")
        #expect(
            try owner.scalar("SELECT count(*) FROM tokenkeeper.held_result WHERE cause = 'stale'") != "0",
            "seed \(seed): some 410s were held")
        let heldLogouts = Int(try owner.scalar("SELECT count(*) FROM tokenkeeper.held_registration") ?? "") ?? 0
        #expect(heldLogouts > histories / 4, "seed \(seed): the guard held \(heldLogouts) logouts")
        // Each receipt that is counted is in the counts, with those of forgotten tokens.
        #expect(
            try owner.lines(
                """
                SELECT topic_id, cause, hour, sum(tokens) FROM (
                    SELECT c.topic_id, c.cause, c.hour, c.tokens FROM tokenkeeper.suppression_count AS c
                    UNION ALL
                    SELECT r.topic_id, r.cause, tokenkeeper.hour_of(r.received_at), -1 FROM tokenkeeper.receipt AS r WHERE r.counted) AS s
                GROUP BY 1, 2, 3 HAVING sum(tokens) < 0
                """, columns: 4) == [], "seed \(seed)")
        // The ledger and the held results together do not depend on the order. So after a release, the ledger is as if nothing
        // had been held.
        for topic in heldTopics {
            try owner.execute(
                "SELECT tokenkeeper.release_held('\(topic)', e) FROM unnest('{production,sandbox}'::text[]) AS e")
        }
        try eventually("the queues are empty") { try owner.scalar(isEmpty) == "0" }
        #expect(
            try owner.lines(
                "SELECT (SELECT count(*) FROM tokenkeeper.held_result), (SELECT count(*) FROM tokenkeeper.held_registration)",
                columns: 2) == ["0|0"], "what is released is not held again")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.rejected_registration") == "0", "seed \(seed)")
        for daemon in daemons { #expect(daemon.stop() == 0) }

        try database.finishErasures()
        try owner.execute(LedgerModel.settle)
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
        #expect(
            try owner.scalar("SELECT count(*) FROM tokenkeeper.suppression_count WHERE tokens < 0") != "0",
            "seed \(seed): some were undone after they had counted")
        let touched = Int(try owner.scalar("SELECT count(*) FROM tokenkeeper.ledger") ?? "") ?? 0
        #expect(touched > histories * 35, "the histories touched \(touched) tokens")
        // The gate says the same as the view.
        #expect(
            try owner.scalar(
                "SELECT count(*) FROM tokenkeeper.token AS t WHERE tokenkeeper.is_sendable(t.token, t.topic, t.environment) <> t.sendable"
            ) == "0")
    }

    private static func step(_ history: Int, _ topics: [String], _ chance: inout SeededChance) -> Step {
        // In seconds. All instants of a history are within an hour, so that ties are common.
        let at = 1_700_000_000 + Int.random(in: 0..<60, using: &chance) * 60
        let moment = "to_timestamp(\(at))"
        let environment = ["production", "sandbox"].randomElement(using: &chance)!
        let topic = topics.randomElement(using: &chance)!
        let number = Int.random(in: 0xA0...0xAB, using: &chance)
        // Some tokens never have a device and belong to one history only: these may be forgotten.
        let isOfDevice = number < 0xA9
        let hex = isOfDevice ? String(number, radix: 16) : String(number << 16 | history, radix: 16)
        let spelling = Bool.random(using: &chance) ? hex : hex.uppercased()
        let key = LedgerModel.Key(environment, topic, hex)
        func result(_ status: Int, _ body: String?, sentAt: String, queuedAt: String = "clock_timestamp()") -> String {
            let text = body.map { "'\($0)'" } ?? "NULL"
            return
                "INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at, queued_at) VALUES ('\(environment)', '\(topic)', '\(spelling)', \(status), \(text), \(sentAt), \(queuedAt))"
        }
        // When a 410 is received does not depend on its timestamp. If it is earlier, by a clock that is slow, the 410 counts as of then.
        let receivedAt = 1_700_000_000 + Int.random(in: 0..<90, using: &chance) * 60
        // APNs repeats a 410 with the same timestamp: in the same batch and in others, inside and outside of the windows.
        func goes(_ at: Int, _ reason: String) -> Step {
            let again =
                Int.random(in: 0..<3, using: &chance) == 0
                ? 1_700_000_000 + Int.random(in: 0..<90, using: &chance) * 60 : nil
            let receipts = [receivedAt] + (again.map { [$0] } ?? [])
            return Step(
                sql: receipts.map {
                    result(
                        410, #"{"reason":"\#(reason)","timestamp":\#(at)000}"#, sentAt: "now()",
                        queuedAt: "to_timestamp(\($0))")
                }.joined(separator: ";")
            ) { model in
                for receivedAt in receipts {
                    model.invalidate(key, .stale, min(at, receivedAt), reason, receivedAt: receivedAt)
                }
            }
        }
        func suspect(_ status: Int, _ body: String?, _ reason: String) -> Step {
            Step(sql: result(status, body, sentAt: moment, queuedAt: "to_timestamp(\(receivedAt))")) {
                $0.invalidate(key, .suspect, min(at, receivedAt), reason, receivedAt: receivedAt)
            }
        }
        switch Int.random(in: 0..<100, using: &chance) {
        case 0..<35:
            let device = isOfDevice ? Self.name("d\(history)-", &chance) : nil
            let user = Self.name("u\(history)-", &chance)
            let tags = Int.random(in: 0..<4, using: &chance) == 0 ? "g\(Int.random(in: 0..<4, using: &chance))" : nil
            let more = "\(Self.literal(device)), \(tags.map { "'{\($0)}'" } ?? "NULL"), \(Self.literal(user))"
            let one = "SELECT tokenkeeper.register('\(spelling)', '\(topic)', '\(environment)', \(moment), \(more))"
            // The same as an element of an array.
            let many = """
                SELECT tokenkeeper.register(ARRAY[ROW('<\(spelling)>', '\(topic)', '\(environment)', \(moment), \(Self.literal(device)),
                    \(tags.map { "'{\($0)}'" } ?? "NULL"), \(Self.literal(user)), NULL)]::tokenkeeper.new_registration[])
                """
            // With a source or without: the file's registrations count as those of the application.
            let queued = """
                INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, tags, user_id, source_id)
                VALUES ('\(environment)', '\(topic)', '\(spelling)', \(moment), \(more), \(Bool.random(using: &chance) ? "1" : "NULL"))
                """
            return Step(sql: [one, one, one, many, queued, queued].randomElement(using: &chance)!) {
                $0.register(key, at, device: device, tags: tags, user: user)
            }
        case 35..<37:
            return Step(
                sql: "SELECT tokenkeeper.unregister('\(spelling)', '\(topic)', '\(environment)', \(moment))"
            ) { $0.invalidate(key, .unregisteredByApp, at, Self.logout) }
        case 37..<39:
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered)
                    VALUES ('\(environment)', '\(topic)', '\(spelling)', \(moment), true)
                    """
            ) { $0.invalidate(key, .unregisteredByApp, at, Self.logout) }
        case 39..<45:
            // A logout that a source reports. An instant after it was received counts as then.
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id, queued_at)
                    VALUES ('\(environment)', '\(topic)', '\(spelling)', \(moment), true, \(Int.random(in: 1...2, using: &chance)), to_timestamp(\(receivedAt)))
                    """
            ) { $0.invalidate(key, .unregisteredByApp, min(at, receivedAt), Self.logout, receivedAt: receivedAt) }
        case 45..<65:
            let reason = ["Unregistered", "ExpiredToken"].randomElement(using: &chance)!
            // Half of them have one of six timestamps, so that the same 410 is often received again.
            return goes(Bool.random(using: &chance) ? at : at - (at - 1_700_000_000) % 600, reason)
        case 65..<70:
            // A 410 that APNs does not send: suspect, with a reason that says why.
            let (body, reason) = Self.doubtful(at).randomElement(using: &chance)!
            return suspect(410, body, reason)
        case 95:
            // Apple adds reasons without notice.
            return goes(at, "Replaced")
        case 70..<84:
            let reason = ["BadDeviceToken", "DeviceTokenNotForTopic"].randomElement(using: &chance)!
            return suspect(400, #"{"reason":"\#(reason)"}"#, reason)
        case 84..<86:
            let cause = LedgerModel.Cause.allCases.randomElement(using: &chance)!
            let since = receivedAt
            let until = since + Int.random(in: 0..<10, using: &chance) * 60
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.topic_policy (environment, topic) VALUES ('\(environment)', '\(topic)') ON CONFLICT DO NOTHING;
                    SELECT tokenkeeper.reinstate('\(topic)', '\(environment)', to_timestamp(\(since)), to_timestamp(\(until)), '\(cause.rawValue)')
                    """
            ) { $0.reinstate(environment, topic, since...until, cause) }
        case 86 where !isOfDevice && Bool.random(using: &chance):
            return Step(sql: "SELECT tokenkeeper.forget('\(spelling)')") { $0.forget(hex) }
        case 86..<91:
            return Step(sql: result(200, nil, sentAt: moment)) { _ in }
        case 91..<95:
            let (status, reason) = [
                (400, "BadTopic"), (429, "TooManyRequests"), (503, "Shutdown"), (413, "PayloadTooLarge"),
            ].randomElement(using: &chance)!
            return Step(sql: result(status, #"{"reason":"\#(reason)"}"#, sentAt: moment)) { _ in }
        default:
            // In seconds instead of milliseconds, or far in the future: not understood.
            let timestamp = [at, 4_000_000_000_000].randomElement(using: &chance)!
            return Step(sql: result(410, #"{"reason":"Unregistered","timestamp":\#(timestamp)}"#, sentAt: moment)) {
                _ in
            }
        }
    }

    /// One of a few devices or users; nil keeps the known one, and empty clears it.
    private static func name(_ prefix: String, _ chance: inout SeededChance) -> String? {
        switch Int.random(in: 0..<10, using: &chance) {
        case 0..<4: nil
        case 4: ""
        default: "\(prefix)\(Int.random(in: 0..<4, using: &chance))"
        }
    }

    private static let logout = "unregistered by the app"

    private static func literal(_ text: String?) -> String { text.map { "'\($0)'" } ?? "NULL" }

    /// The bodies of 410s that APNs does not send, and the reason that each counts under. Some have a timestamp, which must not
    /// count.
    private static func doubtful(_ at: Int) -> [(body: String?, reason: String)] {
        let earlier = at - 600
        return [
            (nil, "410 without a body"), (" ", "410 without a body"),
            ("<html>410 Gone</html>", "410 with a body that is not from APNs"),
            (#"{"reason":"Unregis"#, "410 with a body that is not from APNs"),
            ("[\(earlier)000]", "410 with a body that is not from APNs"),
            (#"{"timestamp":\#(earlier)000}"#, "410 without a reason"), ("{}", "410 without a reason"),
            (#"{"reason":["Unregistered"],"timestamp":\#(earlier)000}"#, "410 without a reason"),
            (#"{"reason":"Unregistered"}"#, "410 without a timestamp"),
            (#"{"reason":"Unregistered","timestamp":null}"#, "410 without a timestamp"),
            (#"{"reason":"Unregistered","timestamp":"\#(earlier)000"}"#, "410 without a timestamp"),
            (#"{"reason":"Unregistered","timestamp":\#(earlier)000.5}"#, "410 without a timestamp"),
            ("Unregistered", "Unregistered"), (#" "ExpiredToken" "#, "ExpiredToken"),
        ]
    }
}
