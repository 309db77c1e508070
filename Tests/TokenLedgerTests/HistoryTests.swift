import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Histories` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// A token of 32 bytes with this beginning.
    private func token(_ beginning: String) -> String {
        beginning + String(repeating: "0", count: 64 - beginning.count)
    }

    /// Records one result of topic t as the drain does, far below the guard's limit.
    private func record(_ token: String, staleAt: String? = nil, suspectAt: String? = nil, reason: String) throws {
        let busy = try database.psql(
            """
            SELECT busy FROM tokenkeeper.record(ARRAY[tokenkeeper.invalidation_of(
                1, tokenkeeper.ensure_topic('production', 't'), tokenkeeper.token_key('\(token)'), '\(staleAt == nil ? "suspect" : "stale")',
                '\(staleAt ?? suspectAt ?? "")', '\(reason)', '\(staleAt ?? suspectAt ?? "")')], 1000, 0.005, NULL)
            """)
        #expect(busy == "{}", "the result is recorded")
    }

    private func register(
        _ token: String, at instant: String, topic: String = "t", environment: String = "production",
        device: String? = nil
    ) throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('\(token)', '\(topic)', '\(environment)', '\(instant)', \(device.map { "'\($0)'" } ?? "NULL"))
            """)
    }

    /// As the daemons do.
    private func undo() throws {
        var daemon = try database.connect(user: "a_daemon")
        try TokenLedgerTests.undo(&daemon)
    }

    /// As the sweep does.
    private func prune(_ token: String) throws {
        try database.psql(
            """
            WITH gone AS (DELETE FROM tokenkeeper.ledger AS l WHERE l.token_key = '\\x\(token)' RETURNING l.*)
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, registered_before, invalidated_before)
            SELECT topic_id, token_key, 'pruned', 'stale', stale_reason, device_id, nullif(registered_at, '-infinity'), stale_at FROM gone
            """)
    }

    private func hold(_ token: String) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.held_result (topic_id, token_key, invalidated_at, reason, topic, token, status, queued_at)
            SELECT topic_id, '\\x\(token)', '2025-01-09Z', 'BadDeviceToken', topic, '\(token)', 400, now()
            FROM tokenkeeper.topic WHERE topic = 't'
            """)
    }

    private func answer(
        _ subject: TokenLookup.Subject, topic: String? = nil, environment: String? = nil, user: String = "a_reader"
    ) throws -> TokenLookup.Answer {
        var connection = try database.connect(user: user)
        return try TokenLookup(subject, topic: topic, environment: environment).answer(on: &connection)
    }

    private func histories(
        _ digits: String, topic: String? = nil, environment: String? = nil, user: String = "a_reader"
    ) throws -> [TokenHistory] {
        let subject = TokenLookup.Subject.token(try #require(TokenDigits(digits)))
        guard case .histories(let histories) = try answer(subject, topic: topic, environment: environment, user: user)
        else { return [] }
        return histories
    }

    private func history(_ digits: String, user: String = "a_reader") throws -> TokenHistory {
        let found = try histories(digits, user: user)
        #expect(found.count == 1)
        return try #require(found.first)
    }

    private func isActive(_ token: String) throws -> Bool {
        try database.psql("SELECT sendable FROM tokenkeeper.token WHERE token_key = '\\x\(token)' AND topic = 't'")
            == "t"
    }

    @Test(arguments: ["a_reader", "a_operator"])
    func `a stale token shows the registration that it suppresses, and what would revive it`(user: String) throws {
        try register(token("aabbccdd"), at: "2025-01-01 08:00Z", device: "d1")
        try record(token("aabbccdd"), staleAt: "2025-01-02 20:00Z", reason: "Unregistered")
        let history = try history(token("aabbccdd").uppercased(), user: user)
        #expect(
            history.token == token("aabbccdd") && history.deviceID == "d1" && !history.isSendable && !history.isObserved
        )
        #expect(
            Explanation.verdict(history)
                == "must not be sent to: APNs said Unregistered as of 2025-01-02 20:00:00 UTC, which is not earlier than the last registration, 2025-01-01 08:00:00 UTC"
        )
        #expect(Explanation.revival(history) == "a registration later than 2025-01-02 20:00:00.000000 UTC")
        #expect(
            history.events.map(Explanation.event) == [
                "registered for the first time, as of 2025-01-01 08:00:00 UTC, device d1",
                "invalidated: APNs said Unregistered as of 2025-01-02 20:00:00 UTC, which is not earlier than the last registration, 2025-01-01 08:00:00 UTC",
            ])
        try register(token("aabbccdd"), at: "2025-01-02 20:00Z")
        #expect(try !isActive(token("aabbccdd")))
        try register(token("aabbccdd"), at: "2025-01-02 20:00:00.000001Z")
        let revived = try self.history("aabbccdd", user: user)
        #expect(
            revived.isSendable && Explanation.revival(revived) == nil
                && Explanation.verdict(revived).hasPrefix("may be sent to"))
        #expect(revived.events.map(\.event) == ["registered", "invalidated", "revived"])
        #expect(
            Explanation.event(try #require(revived.events.last)).contains(
                "as of 2025-01-02 20:00:00.000001 UTC, later than what was known against it, 2025-01-02 20:00:00.000000 UTC"
            ),
            "instants of the same second are told apart")
    }

    @Test func `a late 410 is shown, and the token stays active`() throws {
        try register(token("aabbccdd"), at: "2025-01-03Z")
        try record(token("aabbccdd"), staleAt: "2025-01-02Z", reason: "Unregistered")
        let history = try history("aabbccdd")
        #expect(
            Explanation.verdict(history)
                == "may be sent to: last registered at 2025-01-03 00:00:00 UTC, which is later than what is known against it, that APNs said Unregistered as of 2025-01-02 00:00:00 UTC"
        )
        #expect(
            history.events.last.map(Explanation.event)
                == "came too late and was ignored: APNs said Unregistered as of 2025-01-02 00:00:00 UTC, which is earlier than the last registration, 2025-01-03 00:00:00 UTC"
        )
    }

    /// By the function, and by the queue.
    @Test func `each change of user is shown, and names nobody who was forgotten`() throws {
        for (user, day) in [("'anna'", 1), ("'anna'", 2), ("'bert'", 3), ("NULL", 4), ("''", 5)] {
            try database.psql(
                "SELECT tokenkeeper.register('\(token("aabbccdd"))', 't', registered_at => '2025-01-0\(day)Z', user_id => \(user))"
            )
        }
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, registered_at, user_id) VALUES ('t', '\(token("aabbccdd"))', '2025-01-06Z', 'carl')"
        )
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        let first = "registered for the first time, as of 2025-01-01 00:00:00 UTC, user anna"
        let changes = ["passed to user bert", "belongs to no user any more", "passed to user carl"]
        #expect(try history("aabbccdd").events.map(Explanation.event) == [first] + changes)
        try database.psql("SELECT tokenkeeper.forget_user('anna')", user: "a_app")
        #expect(try history("aabbccdd").events.map(Explanation.event) == changes)
    }

    @Test func `the command that the explanation names revives a suspect`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z")
        try record(token("aabbccdd"), suspectAt: "2025-01-02 20:00:00.123456Z", reason: "BadDeviceToken")
        let words = try #require(Explanation.revival(try history("aabbccdd")))
        let command =
            "`tokenkeeperd reinstate --topic t --environment production --since 2025-01-02T20:00:00.123456Z --until 2025-01-02T20:00:00.123456Z`"
        #expect(words.contains("2025-01-02 20:00:00.123456 UTC; or") && words.contains(command))
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', '2025-01-02T20:00:00.123456Z', '2025-01-02T20:00:00.123456Z')"
        )
        try undo()
        let history = try history("aabbccdd")
        #expect(history.state == "active")
        #expect(history.events.map(\.event) == ["registered", "invalidated", "reinstatement", "reinstated"])
        #expect(
            history.events.last.map(Explanation.event)
                == "reinstated: that APNs said BadDeviceToken as of 2025-01-02 20:00:00 UTC does not count any more")
        #expect(
            history.events[2].isOfTopic
                && Explanation.event(history.events[2]).hasPrefix(
                    "(topic) owner reinstated: suspects received from 2025-01-02 20:00:00 UTC to ")
        )
    }

    @Test func `a token known only by a suspect is unknown after the undo`() throws {
        try record(token("aabbccdd"), suspectAt: "2025-01-02Z", reason: "BadDeviceToken")
        #expect(
            Explanation.verdict(try history("aabbccdd")).hasSuffix(
                "as of 2025-01-02 00:00:00 UTC, and it was never registered"))
        try database.psql("SELECT tokenkeeper.reinstate('t', 'production', '2025-01-01Z', '2025-01-03Z')")
        try undo()
        let history = try history("aabbccdd")
        #expect(history.state == nil && history.isSendable)
        #expect(
            Explanation.verdict(history).hasPrefix("may be sent to: it is unknown again since it was reinstated at 20"))
    }

    @Test func `a superseded token shows its device's newer token, and a later registration revives it`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z", device: "d1")
        try register(token("11223344"), at: "2025-01-02Z", device: "d1")
        try register(token("99999999"), at: "2025-01-09Z", topic: "u", device: "d1")
        let history = try history("aabbccdd")
        #expect(history.state == "superseded")
        #expect(
            Explanation.verdict(history)
                == "must not be sent to: its device has a newer token, 11223344…, registered at 2025-01-02 00:00:00 UTC; its own last registration is 2025-01-01 00:00:00 UTC"
        )
        #expect(
            Explanation.revival(history)
                == "a registration later than that of the device's newer token, 11223344…: 2025-01-02 00:00:00.000000 UTC"
        )
        try register(token("aabbccdd"), at: "2025-01-02 00:00:00.000001Z")
        #expect(try isActive(token("aabbccdd")))
    }

    @Test func `a stale token whose device has a newer one needs a registration later than both`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z", device: "d1")
        try record(token("aabbccdd"), staleAt: "2025-01-02Z", reason: "Unregistered")
        try register(token("11223344"), at: "2025-01-05Z", device: "d1")
        let history = try history("aabbccdd")
        #expect(history.state == "stale")
        #expect(Explanation.revival(history)?.contains("11223344…: 2025-01-05 00:00:00.000000 UTC") == true)
        try register(token("aabbccdd"), at: "2025-01-04Z")
        #expect(try !isActive(token("aabbccdd")), "otherwise the text would ask for too much")
        try register(token("aabbccdd"), at: "2025-01-06Z")
        #expect(try isActive(token("aabbccdd")))
    }

    @Test func `an unregistration by the app is shown as such`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z")
        try database.psql("SELECT tokenkeeper.unregister('\(token("aabbccdd"))', 't', at => '2025-01-02Z')")
        let history = try history("aabbccdd")
        #expect(
            Explanation.verdict(history).hasPrefix(
                "must not be sent to: the app unregistered it as of 2025-01-02 00:00:00 UTC, which"))
        #expect(
            history.events.last.map(Explanation.event)?.hasPrefix("unregistered by the app as of 2025-01-02") == true)
    }

    @Test func `the history survives pruning`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z", device: "d1")
        try record(token("aabbccdd"), staleAt: "2025-01-02Z", reason: "Unregistered")
        try prune(token("aabbccdd"))
        try database.psql("UPDATE tokenkeeper.topic_policy SET gate = 'observe'")
        let history = try history("aabbccdd")
        #expect(history.state == nil && history.isSendable && history.deviceID == "d1" && history.registeredAt == nil)
        #expect(Explanation.verdict(history).hasPrefix("may be sent to: it was pruned at 20"))
        #expect(Explanation.revival(history) == "it is unknown now, so it may be sent to")
        #expect(
            history.events.map(\.event) == ["registered", "invalidated", "pruned"],
            "what the topic went through afterwards is not in its history")
        #expect(
            history.events.last.map(Explanation.event)
                == "pruned, after it had been suppressed for long: APNs said Unregistered as of 2025-01-02 00:00:00 UTC"
        )
    }

    @Test func `with an observing gate, the verdict says that the gate answers true`() throws {
        try record(token("aabbccdd"), staleAt: "2025-01-02Z", reason: "Unregistered")
        try database.psql("UPDATE tokenkeeper.topic_policy SET gate = 'observe'")
        let history = try history("aabbccdd")
        #expect(history.isSuppressed && history.isObserved && history.isSendable)
        #expect(
            Explanation.verdict(history).hasPrefix("must not be sent to: ")
                && Explanation.verdict(history).hasSuffix("answers true nevertheless"))
        #expect(
            history.events.last.map(Explanation.event)
                == "(topic) the policy was changed by owner: gate is observe, was the default")
    }

    @Test func `a token is found by its first digits, in either case, even an odd number of them`() throws {
        for beginning in ["aabbccdd", "aabbccde", "ffffffff", "fffffffe"] {
            try register(token(beginning), at: "2025-01-01Z")
        }
        let all = String(repeating: "f", count: 64)
        try register(all, at: "2025-01-01Z")
        try register(all + "ff", at: "2025-01-01Z")
        #expect(try histories("AABBCCDD").map(\.token) == [token("aabbccdd")])
        #expect(try histories("aabbccdd0").map(\.token) == [token("aabbccdd")])
        #expect(try histories("aabbccdd1").isEmpty)
        #expect(try histories("fffffffff").map(\.token) == [all, all + "ff"])
        #expect(try histories("ffffffff").map(\.token) == [token("ffffffff"), all, all + "ff"])
        #expect(try histories(all).map(\.token) == [all], "a whole token matches only itself")
        #expect(try histories(String(repeating: "f", count: 1024)).isEmpty)
    }

    @Test func `a token in several topics and environments is explained in each, or in the requested one`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z")
        try register(token("aabbccdd"), at: "2025-01-01Z", topic: "u")
        try register(token("aabbccdd"), at: "2025-01-01Z", environment: "sandbox")
        #expect(
            try histories("aabbccdd").map { "\($0.topic) \($0.environment)" } == [
                "t production", "t sandbox", "u production",
            ])
        #expect(try histories("aabbccdd", topic: "u").map(\.topic) == ["u"])
        #expect(try histories("aabbccdd", environment: "sandbox").map(\.environment) == ["sandbox"])
        #expect(try histories("aabbccdd", topic: "u", environment: "sandbox").isEmpty)
        for history in try histories("aabbccdd") { #expect(history.events.count == 1, "each has its own history") }
    }

    @Test func `first digits that match more than ten tokens list them; a whole token is always explained`() throws {
        for number in 0..<10 { try register(token("aabbccdd\(number)"), at: "2025-01-01Z") }
        #expect(try histories("aabbccdd").count == 10)
        try register(token("aabbccdda"), at: "2025-01-01Z", topic: "u")
        guard case .tooMany(let first, andMore: false) = try answer(.token(#require(TokenDigits("aabbccdd")))) else {
            return #expect(Bool(false), "eleven are too many")
        }
        #expect(first.count == 11 && first.allSatisfy { $0.state == "active" && $0.events.isEmpty })
        #expect(try histories("aabbccdd", topic: "t").count == 10)
        for number in 0..<11 { try register(token("11223344"), at: "2025-01-01Z", topic: "t\(number)") }
        #expect(try histories(token("11223344")).count == 11)
    }

    @Test func `a device's tokens include former ones`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z", device: "d1")
        try register(token("11223344"), at: "2025-01-02Z", device: "d1")
        try register(token("55667788"), at: "2025-01-02Z", device: "d2")
        try prune(token("aabbccdd"))
        guard case .histories(let found) = try answer(.device("d1")) else {
            return #expect(Bool(false), "nothing found")
        }
        #expect(
            found.map { "\($0.token.prefix(8)) \($0.state ?? "unknown")" } == ["11223344 active", "aabbccdd unknown"])
        guard case .nothing(rejected: 0) = try answer(.device("d3")) else {
            return #expect(Bool(false), "d3 is unknown")
        }
        guard case .nothing(rejected: 0) = try answer(.device("d1"), topic: "u") else {
            return #expect(Bool(false), "it belongs to another topic")
        }
    }

    @Test func `a user's tokens include former ones, and the history names the user`() throws {
        for (token, user) in [("aabbccdd", "ann"), ("11223344", "ann"), ("55667788", "ben"), ("11223344", "ben")] {
            try database.psql("SELECT tokenkeeper.register('\(self.token(token))', 't', user_id => '\(user)')")
        }
        guard case .histories(let found) = try answer(.user("ann")) else {
            return #expect(Bool(false), "nothing found")
        }
        #expect(found.map { "\($0.token.prefix(8)) \($0.userID ?? "")" } == ["11223344 ben", "aabbccdd ann"])
        #expect(found[1].events.map(\.userID) == ["ann"])
        #expect(found[1].events.map(Explanation.event).first?.hasSuffix(" UTC, user ann") == true)
        var reader = try database.connect(user: "a_reader")
        let json = try HistoryJSON.array(of: [found[1]], on: &reader)
        #expect(
            json.components(separatedBy: #""user_id" : "ann""#).count == 3, "of the token and of its event: \(json)")
        try prune(token("aabbccdd"))
        guard case .histories(let left) = try answer(.user("ann")) else {
            return #expect(Bool(false), "nothing found")
        }
        #expect(
            left.map { "\($0.token.prefix(8)) \($0.state ?? "unknown")" } == ["11223344 active", "aabbccdd unknown"])
        #expect(left[1].userID == "ann", "the last that is known")
        guard case .nothing(rejected: 0) = try answer(.user("nobody")) else {
            return #expect(Bool(false), "nobody is unknown")
        }
    }

    @Test func `held and rejected results belong to the history, except those of other topics`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z")
        try register(token("11223344"), at: "2025-01-01Z")
        try hold(token("aabbccdd"))
        try hold(token("55667788"))
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, environment, topic, token, status, queued_at) VALUES
                ('no topic', NULL, NULL, '\(token("aabbccdd").uppercased())', 410, now()),
                ('no such environment', 'staging', 't', '\(token("aabbccdd"))', 410, now()),
                ('of another topic', NULL, 'u', '\(token("aabbccdd"))', 410, now()),
                ('of the other environment', 'sandbox', 't', '\(token("aabbccdd"))', 410, now()),
                ('of nobody', NULL, 't', '\(token("99999999"))', 410, now())
            """)
        let history = try history("aabbccdd")
        #expect(history.events.map(\.event) == ["registered", "held", "rejected", "rejected"])
        #expect(
            Explanation.event(history.events[1])
                == "held by the mass-failure guard: APNs said BadDeviceToken; it would count as of 2025-01-09 00:00:00 UTC; see `tokenkeeperd held list`"
        )
        #expect(history.events.compactMap(\.message) == ["no topic", "no such environment"])
        #expect(try self.history("11223344").events.map(\.event) == ["registered"])
        let held = try self.history("55667788")
        #expect(
            held.state == nil && held.isSendable && held.events.map(\.event) == ["held"], "nothing else is known of it")
        guard case .nothing(rejected: 1) = try answer(.token(#require(TokenDigits(token("99999999"))))) else {
            return #expect(Bool(false), "only a rejected result has it")
        }
        // Of a large table, only the latest are read.
        try database.psql(
            "INSERT INTO tokenkeeper.rejected_result (error, token, queued_at) SELECT 'x', NULL, now() FROM generate_series(1, 10000)"
        )
        guard case .nothing(rejected: 0) = try answer(.token(#require(TokenDigits(token("99999999"))))) else {
            return #expect(Bool(false), "10,000 others were rejected since")
        }
    }

    @Test func `operations on the token's topic are shown from the token's first event on`() throws {
        try register(token("99999999"), at: "2025-01-01Z")
        try register(token("99999999"), at: "2025-01-01Z", topic: "u")
        let operation = "INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message) VALUES"
        try database.psql("\(operation) ('guard_tripped', 'production', 't', 1, 'before')")
        try register(token("aabbccdd"), at: "2025-01-01Z")
        try database.psql(
            """
            \(operation) ('guard_tripped', 'production', 't', 60, 'suspects would silence 60 tokens'),
                ('guard_tripped', 'production', 'u', 60, 'of another topic'), ('guard_tripped', 'sandbox', 't', 60, 'elsewhere'),
                ('held_discarded', 'production', 't', 7, NULL), ('forgotten', NULL, NULL, 3, NULL)
            """)
        let events = try history("aabbccdd").events
        #expect(
            events.dropFirst().map(Explanation.event) == [
                "(topic) the mass-failure guard tripped: suspects would silence 60 tokens",
                "(topic) 7 held results were discarded by owner, and never count",
            ])
    }

    @Test func `the JSON is one line with the same words`() throws {
        try register(token("aabbccdd"), at: "2025-01-01Z", device: "d\n\"1\"")
        try record(token("aabbccdd"), staleAt: "2025-01-02 20:00Z", reason: "Unregistered")
        try record(token("aabbccde"), staleAt: "2025-01-02 20:00Z", reason: "Unregistered")
        try prune(token("aabbccde"))
        var reader = try database.connect(user: "a_reader")
        let found = try histories("aabbccdd") + histories("aabbccde")
        let text = try HistoryJSON.array(of: found, on: &reader)
        #expect(!text.contains("\n"))
        let array = try #require(try JSONSerialization.jsonObject(with: Data(text.utf8)) as? [[String: Any]])
        #expect(array.count == 2)
        #expect(array[0]["token"] as? String == token("aabbccdd") && array[0]["device_id"] as? String == "d\n\"1\"")
        #expect(array[0]["sendable"] as? Bool == false && array[0]["observed"] as? Bool == false)
        #expect(array[0]["invalidated_at"] as? String == "2025-01-02T20:00:00+00:00")
        #expect(array[0]["revived_by"] as? String == Explanation.revival(found[0]))
        let history = try #require(array[0]["history"] as? [[String: Any]])
        #expect(history.map { $0["event"] as? String } == ["registered", "invalidated"])
        #expect(history.map { $0["text"] as? String } == found[0].events.map(Explanation.event))
        #expect(history[1]["invalidated_after"] as? String == "2025-01-02T20:00:00+00:00")
        #expect(array[1]["state"] is NSNull && array[1]["sendable"] as? Bool == true)
        #expect((array[1]["history"] as? [Any])?.count == 2)
        #expect(try HistoryJSON.array(of: [], on: &reader) == "[]")
    }

    @Test func `the search reads only a few rows of large tables`() throws {
        // The statistics of a session arrive when it ends: this one must not stay open.
        do {
            var setup = try database.connect()
            try setup.execute(
                """
                SELECT tokenkeeper.register('aa', 't');
                ANALYZE tokenkeeper.ledger, tokenkeeper.topic, tokenkeeper.token_event_log, tokenkeeper.held_result;
                SELECT count(tokenkeeper.register(encode(sha256(i::text::bytea), 'hex'), 't', device_id => 'd' || i)) FROM generate_series(1, 3000) AS i;
                INSERT INTO tokenkeeper.held_result (topic_id, token_key, invalidated_at, reason, topic, queued_at)
                SELECT topic_id, sha256(i::text::bytea), now(), 'r', 't', now() FROM generate_series(1, 3000) AS i, tokenkeeper.topic;
                """)
        }
        let read = """
            SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
                + (SELECT sum(i.idx_tup_read) FROM pg_stat_user_indexes AS i WHERE i.relid = t.relid))
            FROM pg_stat_user_tables AS t WHERE relname ~ '^(ledger|held_result|token_event_log)'
            """
        func settled() throws -> Int {
            var last = -1
            try eventually("the statistics arrive") {
                let now = Int(try database.psql(read)) ?? 0
                defer { last = now }
                usleep(200_000)
                return now == last
            }
            return last
        }
        let before = try settled()
        #expect(try histories("6b86b273").count == 1, "SHA-256 of 1")
        guard case .histories(let found) = try answer(.device("d77")) else {
            return #expect(Bool(false), "nothing found")
        }
        #expect(found.count == 1)
        try eventually("the statistics arrive") { Int(try database.psql(read)) ?? 0 > before }
        let after = try settled()
        #expect(after - before < 300, "\(after - before) rows were read")
    }

    @Test(
        arguments: [
            ("aabbccd", nil), ("aabbccdde", "aabbccdde"), ("aabbccdg", nil), ("aabb ccdd", "aabbccdd"), ("aabbcc", nil),
            ("0xaabbcc", nil), ("", nil),
            ("ａａｂｂｃｃｄｄ", nil), ("0xaabbccdd", "aabbccdd"), ("aabb ccdd e", nil),
            (String(repeating: "a", count: 1025), nil), ("AAbbCCdd", "aabbccdd"),
        ] as [(String, String?)])
    func `digits of a token are 8 to 1024 hex digits, in any spelling if it is whole`(text: String, digits: String?) {
        #expect(TokenDigits(text)?.text == digits)
    }

    @Test func `a topic in a command is quoted for a shell`() {
        #expect(ShellWord.quoted("com.example.app-1_x") == "com.example.app-1_x")
        #expect(ShellWord.quoted("a b'; rm") == "'a b'\"'\"'; rm'")
        for word in ["a b'; rm", "`rm`", "$(rm)", "it's", "a\\", "!x", "a\"b"] {
            #expect(
                ShellWord.isInert("tokenkeeperd x --topic \(ShellWord.quoted(word))") == !word.contains("`"), "\(word)")
        }
        for command in ["x `rm`", "DROP PUBLICATION \"$(rm)\";", "x $HOME", "x 'y", "x\ny", "x \"\\\"", "x '`rm`'"] {
            #expect(!ShellWord.isInert(command), "\(command)")
        }
        for command in ["ALTER TABLE \"it's\" RESET (a);", "chgrp a 'b$c'; chmod 640 'b$c'"] {
            #expect(ShellWord.isInert(command), "\(command)")
        }
    }

    @Test(
        arguments: [
            ("revived", "moved", nil, "revived: no other token supersedes it any more"),
            ("pruned", "dormant", nil, "pruned: not registered again since 2025-01-01 00:00:00 UTC"),
            (
                "pruned", "superseded", nil,
                "pruned, after it had been suppressed for long: its device had a newer token"
            ),
            (
                "superseded", "superseded", "a newer token of the same device",
                "superseded: a newer token of the same device was registered"
            ),
            ("invalidated", "stale", nil, "invalidated: APNs said 410"),
            ("something_new", nil, "why", "something_new: why"),
        ] as [(String, String?, String?, String)])
    func `events in words`(event: String, cause: String?, reason: String?, words: String) {
        var said = HistoryEvent(at: HistoryMoment("2025-02-01 00:00:00.000000"), source: .history, event: event)
        said.cause = cause
        said.reason = reason
        said.registeredBefore = HistoryMoment("2025-01-01 00:00:00.000000")
        #expect(Explanation.event(said) == words)
    }
}
