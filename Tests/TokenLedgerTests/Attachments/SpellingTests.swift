import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Spellings of tokens in an attached table` {
    private static let tokens = (0..<6).map { number in
        "a\(number)" + String(repeating: "c\(number)0f", count: number == 0 ? 1 : 8)
    }

    /// One of the ways in which a provider may write a token.
    private static func spelling(_ token: String, _ chance: inout SeededChance) -> String {
        func groups(of size: Int, _ separator: String) -> String {
            let digits = Array(token)
            return stride(from: 0, to: digits.count, by: size)
                .map { String(digits[$0..<min($0 + size, digits.count)]) }.joined(separator: separator)
        }
        let mixed = token.map { chance.dice(2) == 0 ? $0.uppercased() : String($0) }.joined()
        return switch chance.dice(13) {
        case 0: token
        case 1: token.uppercased()
        case 2: "<" + groups(of: 8, " ") + ">"
        case 3: "<" + groups(of: 8, " ").uppercased() + ">"
        case 4: "<" + token + ">"
        case 5: "0x" + mixed
        case 6: "\\x" + token
        case 7: groups(of: 2, "-")
        case 8: groups(of: 2, ":").uppercased()
        case 9: groups(of: 2, " ")
        case 10: " " + token + "\n"
        case 11: "\t<" + groups(of: 4, " ") + " >"
        default: mixed
        }
    }

    private static func literal(_ text: String) -> String {
        "E'" + text.replacing("\\", with: "\\\\").replacing("\n", with: "\\n").replacing("\t", with: "\\t") + "'"
    }

    /// What the table says: active if a registered row has the token, otherwise logged out.
    private func expected(_ rows: [Int: (token: Int, isOut: Bool)], known: Set<Int>) -> String {
        known.sorted().map { token in
            let isActive = rows.values.contains { $0.token == token && !$0.isOut }
            return "\(Self.tokens[token].prefix(4)) \(isActive ? "active" : "unregistered_by_app")"
        }.joined(separator: ", ")
    }

    @Test func `whatever the spellings, a token is active exactly if a registered row has it`() throws {
        let seed = UInt64.random(in: 0...UInt64(UInt32.max))
        var chance = SeededChance(seed: seed)
        let devices = try AttachedDevices()
        var rows: [Int: (token: Int, isOut: Bool)] = [:]
        var known: Set<Int> = []
        var next = 1
        /// A change of the table, as SQL.
        func change() -> String {
            let token = chance.dice(Self.tokens.count)
            let text = Self.literal(Self.spelling(Self.tokens[token], &chance))
            let row = rows.keys.sorted().randomElement(using: &chance)
            switch (chance.dice(6), row) {
            case (0, let row?):
                rows[row] = nil
                return "DELETE FROM app.devices WHERE id = \(row)"
            case (1, let row?):
                rows[row]?.isOut = true
                return "UPDATE app.devices SET logged_out_at = clock_timestamp() WHERE id = \(row)"
            case (2, let row?):
                rows[row]?.isOut = false
                return
                    "UPDATE app.devices SET logged_out_at = NULL, last_seen = clock_timestamp() WHERE id = \(row)"
            case (3, let row?):
                // Another token, or the same one in another spelling.
                rows[row] = (token, false)
                known.insert(token)
                return """
                    UPDATE app.devices SET push_token = \(text), logged_out_at = NULL, last_seen = clock_timestamp()
                    WHERE id = \(row)
                    """
            default:
                let isOut = chance.dice(5) == 0
                rows[next] = (token, isOut)
                known.insert(token)
                next += 1
                return """
                    INSERT INTO app.devices (id, push_token, last_seen, logged_out_at)
                    VALUES (\(next - 1), \(text), clock_timestamp(), \(isOut ? "now()" : "NULL"))
                    """
            }
        }
        // Rows that are there before it is attached.
        try devices.app((0..<8).map { _ in change() }.joined(separator: ";\n"))
        known = Set(rows.values.map(\.token))
        try devices.attach("on_delete => 'unregister'")
        try devices.database.psql(
            "SELECT FROM tokenkeeper.backfill_next((SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')), 100)",
            user: "a_app")
        try devices.drain()
        #expect(try devices.states() == expected(rows, known: known), "seed \(seed)")
        for round in 0..<Soak.size(25, whole: 150) {
            try devices.app((0...chance.dice(6)).map { _ in change() }.joined(separator: ";\n"))
            try devices.drain()
            #expect(try devices.states() == expected(rows, known: known), "seed \(seed), round \(round)")
            guard chance.dice(5) == 0 else { continue }
            // A day passes, and a comparison removes the spellings that the table has no more.
            try devices.database.psql("UPDATE tokenkeeper.token_spelling SET seen_at = seen_at - interval '1 day'")
            #expect(try devices.differences() == "", "seed \(seed), round \(round)")
            #expect(
                try devices.database.psql(
                    """
                    SELECT count(*) FILTER (WHERE d.id IS NULL), count(*) - count(DISTINCT s.spelling) FROM tokenkeeper.token_spelling AS s
                    LEFT JOIN app.devices AS d ON d.push_token = s.spelling
                    """, user: "postgres"
                ).hasPrefix("0|"), "seed \(seed), round \(round)")
        }
    }

    private func devices(_ rows: String) throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, user_id) SELECT r, now() - interval '1 day', 7 FROM unnest(ARRAY[\(rows)]) AS r"
        )
        try devices.drain()
        return devices
    }

    private func spellings(_ devices: AttachedDevices) throws -> String {
        try devices.database.psql(
            "SELECT string_agg(spelling, ',' ORDER BY spelling) FROM tokenkeeper.token_spelling")
    }

    @Test func `a reconciliation logs out tokens without a row among unusually spelled ones, and only these`() throws {
        let devices = try devices("'0001', ' 00 02', '<0003>', '0xAb04', '0005'")
        #expect(try spellings(devices) == " 00 02,0xAb04")
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        try devices.app("DELETE FROM app.devices WHERE push_token IN ('0001', ' 00 02')")
        // Written while the triggers were disabled.
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, user_id) VALUES ('00-01', now() - interval '2 days', 7)")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        #expect(try devices.differences() == "without_row 1")
        #expect(try spellings(devices) == " 00 02,00-01,0xAb04")
        try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)")
        try devices.drain()
        #expect(
            try devices.states()
                == "0001 active, 0002 unregistered_by_app, 0003 active, 0005 active, ab04 active")
        #expect(try devices.differences() == "")
    }

    @Test func `a row that is there before attach is found after a backfill, and after a comparison`() throws {
        for step in [
            "SELECT FROM tokenkeeper.backfill_next((SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')), 1000)",
            "SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)",
        ] {
            let devices = try AttachedDevices()
            try devices.app(
                "INSERT INTO app.devices (push_token, last_seen) VALUES ('00:01', now() - interval '1 day'), ('0001', now())"
            )
            try devices.attach("on_delete => 'unregister'")
            let isRead = "SELECT rows_read_at IS NOT NULL FROM tokenkeeper.attached_table"
            #expect(try devices.database.psql(isRead) == "f")
            // Without the rows, the tokens cannot be compared.
            #expect(throws: (any Error).self) {
                try devices.app(
                    "SELECT FROM tokenkeeper.compare_next((SELECT source_id FROM tokenkeeper.attachment), 'token 0 ')")
            }
            try devices.app(step)
            #expect(try devices.database.psql(isRead) == "t")
            try devices.drain()
            try devices.app("DELETE FROM app.devices WHERE push_token = '0001'")
            try devices.drain()
            #expect(try devices.states() == "0001 active")
            try devices.app("DELETE FROM app.devices")
            try devices.drain()
            #expect(try devices.states() == "0001 unregistered_by_app")
        }
    }

    @Test func `a comparison in batches keeps what it has met, and what has come since it began`() throws {
        let devices = try devices("'00-01', '00-02', '00-03', '00-04', '00-05', '00-06'")
        let source = try devices.app("SELECT source_id FROM tokenkeeper.attachment")
        try devices.database.psql("UPDATE tokenkeeper.token_spelling SET seen_at = seen_at - interval '1 day'")
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        try devices.app("DELETE FROM app.devices WHERE push_token IN ('00-02', '00-06')")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        var position = "NULL"
        var steps = 0
        repeat {
            position =
                "'"
                + (try devices.app("SELECT next_position FROM tokenkeeper.compare_next(\(source), \(position), 2)"))
                + "'"
            steps += 1
            if steps == 2 {
                // Behind the position, with a spelling that the table had a day ago.
                try devices.app("INSERT INTO app.devices (id, push_token, last_seen) VALUES (0, '00-06', now())")
                try devices.drain()
            }
        } while position.hasPrefix("'row ")
        #expect(steps == 3 && position == "'token 0 '")
        #expect(try spellings(devices) == "00-01,00-03,00-04,00-05,00-06")
        for wrong in ["'row '", "'row 1x 5'", "'row 123456789012345678 5'", "'row 5'"] {
            #expect(throws: (any Error).self) {
                try devices.app("SELECT FROM tokenkeeper.compare_next(\(source), \(wrong), 2)")
            }
        }
    }

    @Test func `a token that is erased, pruned, withdrawn or detached leaves no spelling`() throws {
        let devices = try devices("'00-01', '00-02', '00-03', '00-04', '00-05'")
        let source = try devices.app("SELECT source_id FROM tokenkeeper.attachment")
        try devices.database.psql("SELECT tokenkeeper.forget('0001')")
        #expect(try spellings(devices) == "00-02,00-03,00-04,00-05")
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET user_id = 'eight', user_at = clock_timestamp() WHERE token_key = '\\x0002'")
        try devices.database.psql("SELECT tokenkeeper.forget_user('eight')")
        #expect(try spellings(devices) == "00-03,00-04,00-05")
        // A comparison does not keep the spelling of a token that the ledger does not know.
        try devices.app("SELECT FROM tokenkeeper.compare('app.devices')")
        #expect(try spellings(devices) == "00-03,00-04,00-05")
        // Two are pruned, of which one remains in another topic.
        try devices.database.psql(
            """
            SELECT tokenkeeper.register('0004', 'u');
            UPDATE tokenkeeper.ledger AS l SET stale_at = clock_timestamp(), suppressed_since = now() - interval '400 days'
            FROM tokenkeeper.topic AS t WHERE t.topic_id = l.topic_id AND t.topic = 't' AND l.token_key IN ('\\x0003', '\\x0004')
            """)
        var daemon = try devices.database.connect(user: "a_daemon")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 0, maxShare: .percent(100), batch: 100)
        let lease = try #require(try SweepLease.claim(.new(.cli, dryRun: false), holder: "test", on: &daemon))
        let report = try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon, while: { true })
        #expect(report.prunedSuppressed == 2)
        #expect(try spellings(devices) == "00-04,00-05")
        // A backfill under a wrong topic, for example, is withdrawn.
        let run = try devices.app(
            "SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(run), 1000)")
        try devices.drain()
        #expect(try spellings(devices) == "00-01,00-02,00-03,00-04,00-05")
        try devices.app("SELECT FROM tokenkeeper.withdraw(\(run))")
        // Those that were pruned and are known again are kept.
        #expect(try spellings(devices) == "00-03,00-04,00-05")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        #expect(try spellings(devices) == "")
        // What was queued before is applied, and leaves none.
        try devices.database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, source_id) VALUES ('t', '00-06', \(source))")
        try devices.drain()
        #expect(try spellings(devices) == "")
    }
}
