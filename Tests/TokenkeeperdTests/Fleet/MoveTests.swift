import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `A topic moves to another database` {
    private static let topic = "com.example.rider"
    private let folder: TemporaryDirectory
    private let (east, west): (TestDatabase, TestDatabase)

    init() throws {
        folder = try TemporaryDirectory()
        east = try TestCluster.shared.database()
        west = try TestCluster.shared.database()
    }

    /// A map that leads to a database for the topic.
    private func map(_ owner: String, buckets: (String, String) = ("0-511", "512-1023")) throws -> String {
        try folder.write(
            """
            {"databases": {"east": "\(east.url(user: "a_operator"))", "west": "\(west.url(user: "a_operator"))"},
             "topics": {"\(Self.topic)": "\(owner)"}, "buckets": {"east": "\(buckets.0)", "west": "\(buckets.1)"}}
            """, to: "map-\(owner)-\(buckets.0).json")
    }

    private func move(_ arguments: String..., by map: String) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "move"] + arguments, environment: ["TOKENKEEPER_MAP_FILE": map])
    }

    private func token(_ number: Int) -> String { String(format: "%064x", number + 1) }

    private static let all = """
        SELECT concat_ws('|', t.topic, t.environment, t.token, t.state, t.registered_at, t.invalidated_at, t.reason, t.device_id, t.tags, t.user_id)
        FROM tokenkeeper.token AS t WHERE t.topic = '\(Self.topic)' ORDER BY 1
        """

    /// Random calls, with instants of their own, so that their order does not matter.
    private struct Calls {
        var chance: SeededChance

        mutating func number(_ end: Int) -> Int { Int(chance.next() % UInt64(end)) }

        mutating func instant() -> String { "'2026-01-01Z'::timestamptz + interval '\(number(900_000)) seconds'" }

        mutating func call() -> String {
            let environment = number(4) == 0 ? "sandbox" : "production"
            let known = "'\(String(format: "%064x", number(40) + 1))', '\(topic)', '\(environment)', \(instant())"
            if number(4) == 0 { return "SELECT tokenkeeper.unregister(\(known))" }
            let device = number(3) == 0 ? "NULL" : "'device-\(number(9))'"
            let user = number(3) == 0 ? "NULL" : "'user-\(number(5))'"
            return "SELECT tokenkeeper.register(\(known), \(device), NULL, \(user))"
        }

        /// What reaches the queues of a database.
        mutating func row() -> String {
            let token = String(format: "%064x", number(40) + 1)
            if number(2) == 0 {
                return """
                    INSERT INTO tokenkeeper.registration (topic, token, registered_at, device_id, unregistered)
                    VALUES ('\(topic)', '\(token)', \(instant()), 'device-\(number(9))', \(number(5) == 0))
                    """
            }
            let milliseconds = 1_767_225_600_000 + number(900_000) * 1000
            return """
                INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                VALUES ('\(topic)', '\(token)', '410', '{"reason":"Unregistered","timestamp":\(milliseconds)}')
                """
        }
    }

    @Test func `a random history ends as in one database, while both are written to and the move is killed`() throws {
        let alone = try TestCluster.shared.database()
        var calls = Calls(chance: SeededChance(seed: Seed.next()))
        let daemons = try [(east, "east"), (west, "west"), (alone, "alone")].map { database, name in
            try database.daemon([
                "sweep.interval=off", "drain.poll_idle=50ms", "map.file=\(try map("west"))", "map.database=\(name)",
            ])
        }
        func apply(_ steps: Int, to databases: [TestDatabase], rows: Bool = true) throws {
            for _ in 0..<steps {
                let isRow = rows && calls.number(3) == 0
                let statement = isRow ? calls.row() : calls.call()
                for database in [databases[calls.number(databases.count)], alone] {
                    try database.psql(statement, user: isRow ? "postgres" : "a_app")
                }
            }
        }
        let many = """
            SELECT count(tokenkeeper.register(encode(sha256(n::text::bytea), 'hex'), '\(Self.topic)', registered_at => '2026-01-02Z'))
            FROM generate_series(1, 2500) AS n
            """
        for database in [east, alone] { try database.psql(many, user: "a_app") }
        try apply(Soak.isWhole ? 1000 : 80, to: [east])
        let first = try killed(2, by: map("east"), &calls)
        #expect(
            first.status == 0 && first.output.contains("are in west, too. Now change the map on every host"), "\(first)"
        )
        try apply(Soak.isWhole ? 1000 : 80, to: [east, west])
        let second = try killed(3, by: map("west"), &calls)
        #expect(second.status == 0 && second.output.contains("west has it now, with 25"), "\(second)")
        try apply(40, to: [west])
        // Somebody has the old map, and still writes to the queues of the old database.
        for _ in 0..<20 {
            let row = calls.row()
            for database in [east, alone] { try database.psql(row, user: "postgres") }
        }
        for database in [east, west, alone] {
            for table in ["send_result", "registration", "moved_row"] {
                // A row that is passed on reaches the next queue before it leaves this one.
                try eventually("\(table) is empty") {
                    try database.psql("SELECT count(*) FROM tokenkeeper.\(table)", user: "postgres") == "0"
                }
            }
        }
        let expected = try alone.psql(Self.all, user: "postgres")
        let found = try west.psql(Self.all, user: "postgres")
        #expect(found == expected)
        #expect(expected.contains("|stale|") && expected.contains("|superseded|"))
        #expect(try move(Self.topic, "--to", "west", "--end", by: map("west")).status == 0)
        #expect(try west.psql(Self.all, user: "postgres") == expected)
        #expect(try east.psql(Self.all, user: "postgres") == "")
        for database in [east, west] {
            // The counts agree with the tokens.
            #expect(
                try database.psql(
                    "SELECT (SELECT coalesce(sum(tokens), 0) FROM tokenkeeper.token_count) - (SELECT count(*) FROM tokenkeeper.ledger)",
                    user: "postgres") == "0")
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    /// Runs the command and kills it some times, and then to its end.
    private func killed(_ times: Int, by map: String, _ calls: inout Calls) throws -> ProgramRun {
        for _ in 0..<times {
            let process = Process()
            process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
            process.arguments = ["move", Self.topic, "--to", "west"]
            process.environment = ProcessInfo.processInfo.environment.merging(["TOKENKEEPER_MAP_FILE": map]) { $1 }
            process.standardOutput = FileHandle.nullDevice
            process.standardError = FileHandle.nullDevice
            try process.run()
            // Wherever it is then.
            usleep(useconds_t(20_000 + calls.number(200_000)))
            kill(process.processIdentifier, SIGKILL)
            process.waitUntilExit()
        }
        return try move(Self.topic, "--to", "west", by: map)
    }

    @Test func `calls about a topic that has moved name the database that has it`() throws {
        let register =
            "SELECT tokenkeeper.register('\(token(1))', '\(Self.topic)', registered_at => '2026-01-01Z', device_id => 'd')"
        try east.psql(register, user: "a_app")
        try east.psql("UPDATE tokenkeeper.topic_policy SET gate = 'observe', max_per_second = 7", user: "a_operator")
        #expect(try move(Self.topic, "--to", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        let (known, topic) = ("'\(token(1))', '\(Self.topic)'", "'\(Self.topic)'")
        for call in [
            "register(\(known))", "register(\(known), 'sandbox')", "unregister(\(known))", "is_sendable(\(known))",
            "register(ARRAY[ROW(\(known), NULL, NULL, NULL, NULL, NULL, NULL)]::tokenkeeper.new_registration[])",
            "unregister(topic => \(topic), user_id => 'u')", "sendable(ARRAY['\(token(1))'], \(topic))",
            "tag(\(topic), device_id => 'd', add => '{x}')",
            "enqueue('{\"aps\":{\"alert\":\"x\"}}', \(topic), everyone => true)",
        ] {
            let error = #expect(throws: (any Error).self) {
                try east.psql("SELECT tokenkeeper.\(call)", user: "postgres")
            }
            #expect("\(error as Any)".contains("topic 'com.example.rider' has moved to the database 'west'"), "\(call)")
        }
        #expect(
            try west.psql(
                "SELECT gate || max_per_second FROM tokenkeeper.topic_policy WHERE environment = 'production'",
                user: "a_operator") == "observe7")
        let history = "SELECT string_agg(event || at, ',') FROM tokenkeeper.token_event"
        #expect(try west.psql(history, user: "postgres") == east.psql(history, user: "postgres"))
        let explained = try ProgramRun(
            [DaemonProcess.program, "explain", token(1)],
            environment: ["TOKENKEEPER_DATABASE_URL": east.url(user: "a_operator")])
        #expect(
            explained.output.contains(
                "its topic has moved to the database west, which knows it now. Here: may be sent to"),
            "\(explained)")
        let checked = try ProgramRun(
            [DaemonProcess.program, "doctor"], environment: ["TOKENKEEPER_DATABASE_URL": east.url(user: "a_operator")])
        #expect(checked.output.contains("tokenkeeperd move com.example.rider --to west --end"), "\(checked)")
        let status = try ProgramRun(
            [DaemonProcess.program, "--all", "status"], environment: ["TOKENKEEPER_MAP_FILE": map("west")])
        #expect(!status.output.contains("the map leads"), "\(status)")
        #expect(
            try move(Self.topic, "--to", "west", "--end", by: map("west")).output.contains(
                "1 token was deleted from east"))
        try east.psql("SELECT tokenkeeper.is_sendable(\(known))", user: "a_sender")
        #expect(try move(Self.topic, "--to", "east", by: map("east")).status == 78)
        #expect(try move(Self.topic, "--to", "east", "--from", "west", by: map("west")).status == 0)
    }

    @Test func `a topic that has moved goes back before the move has ended`() throws {
        func register(_ number: Int, _ time: Int, device: String, in database: TestDatabase) throws {
            try database.psql(
                """
                SELECT tokenkeeper.register('\(token(number))', '\(Self.topic)', registered_at => '2026-01-01Z'::timestamptz + interval '\(time) days',
                    device_id => '\(device)')
                """, user: "a_app")
        }
        for number in 1...3 { try register(number, 0, device: "d\(number)", in: east) }
        #expect(try move(Self.topic, "--to", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        try register(4, 1, device: "d1", in: west)
        try west.psql("SELECT tokenkeeper.unregister('\(token(2))', '\(Self.topic)')", user: "a_app")
        // No daemon of the old database has passed this on.
        try east.psql(
            "INSERT INTO tokenkeeper.moved_row (topic, queue, content) VALUES ('\(Self.topic)', 'registration', "
                + "'{\"topic\": \"\(Self.topic)\", \"token\": \"\(token(5))\", \"queued_at\": \"2026-01-02T00:00:00Z\"}')",
            user: "postgres")
        let first = try move(Self.topic, "--to", "east", "--from", "west", by: map("west"))
        #expect(first.status == 0 && first.output.contains("4 tokens are in east, too. Now change the map"), "\(first)")
        #expect(try east.psql("SELECT token FROM tokenkeeper.registration", user: "postgres") == token(5))
        try register(3, 2, device: "d3", in: west)
        #expect(try move(Self.topic, "--to", "east", by: map("east")).status == 0)
        #expect(try east.psql(Self.all, user: "postgres") == west.psql(Self.all, user: "postgres"))
        try register(6, 3, device: "d6", in: east)
        #expect(
            try move(Self.topic, "--to", "east", "--end", by: map("east")).output.contains(
                "4 tokens were deleted from west"))
        // And once more.
        #expect(try move(Self.topic, "--to", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        #expect(try west.psql("SELECT count(*) FROM tokenkeeper.token", user: "postgres") == "5")
    }

    @Test func `it waits for transactions that began before the topic was marked`() throws {
        try east.psql("SELECT tokenkeeper.register('\(token(1))', '\(Self.topic)')", user: "a_app")
        var writer = try east.connect(user: "a_app")
        try writer.execute("BEGIN")
        try writer.execute("SELECT tokenkeeper.register('\(token(2))', '\(Self.topic)')")
        let process = Process()
        process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
        process.arguments = ["move", Self.topic, "--to", "west", "--from", "east"]
        process.environment = ProcessInfo.processInfo.environment.merging(["TOKENKEEPER_MAP_FILE": try map("west")]) {
            $1
        }
        process.standardOutput = FileHandle.nullDevice
        try process.run()
        try eventually("the topic is marked") {
            try east.psql("SELECT count(*) FROM tokenkeeper.topic WHERE moved_to = 'west'", user: "postgres") == "2"
        }
        try writer.execute("COMMIT")
        process.waitUntilExit()
        #expect(process.terminationStatus == 0)
        #expect(try west.psql("SELECT count(*) FROM tokenkeeper.token", user: "postgres") == "2")
    }

    @Test func `rows are passed on once, also if the source dies before it could delete them`() throws {
        try east.psql("SELECT tokenkeeper.register('\(token(1))', '\(Self.topic)')", user: "a_app")
        #expect(try move(Self.topic, "--to", "west", "--from", "east", by: map("west")).status == 0)
        try east.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, user_id) SELECT '\(Self.topic)', lpad(n::text, 64, '0'), 'u' || n
            FROM generate_series(1, 3) AS n;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('\(Self.topic)', '\(token(2))', '410', '{"reason":"Unregistered","timestamp":1767225600000}');
            """, user: "postgres")
        // Without a map: the rows wait, and status says so.
        let daemon = try east.daemon(["sweep.interval=off"])
        try eventually("the rows are put aside") {
            try east.psql("SELECT count(*) FROM tokenkeeper.moved_row", user: "postgres") == "4"
        }
        try east.psql("UPDATE tokenkeeper.moved_row SET queued_at = queued_at - interval '6 minutes'", user: "postgres")
        #expect(
            try east.psql("SELECT warnings FROM tokenkeeper.status", user: "a_reader").contains(
                "rows of topics that have moved to another database have been waiting since"))
        #expect(try east.psql("SELECT tokenkeeper.forget_user('u2')", user: "a_operator") == "0")
        let rows = try east.psql("SELECT rows FROM tokenkeeper.moved_rows('\(Self.topic)', 2)", user: "postgres")
        let take = "SELECT tokenkeeper.take_rows('east', '\(Self.topic)', $rows$\(rows)$rows$)"
        #expect(try west.psql(take, user: "a_operator") == "2")
        #expect(try west.psql(take, user: "a_operator") == "0")
        let left = try move(Self.topic, "--to", "west", "--end", by: map("west"))
        #expect(
            left.status == 64 && left.errors.contains("east still has rows that wait to be passed on: 3"), "\(left)"
        )
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        #expect(try east.psql("SELECT count(*) FROM tokenkeeper.moved_row", user: "postgres") == "0")
        #expect(try west.psql("SELECT count(*) FROM tokenkeeper.registration", user: "postgres") == "2")
        #expect(try west.psql("SELECT count(*) FROM tokenkeeper.send_result", user: "postgres") == "1")
        #expect(daemon.stop() == 0)
    }

    @Test func `what cannot move is refused, with the reason`() throws {
        try east.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try east.psql(
            """
            CREATE TABLE app.device (id int PRIMARY KEY, token text UNIQUE);
            SELECT FROM tokenkeeper.attach('app.device', 'token', '''\(Self.topic)''')
            """, user: "a_app")
        let attached = try move(Self.topic, "--to", "west", by: map("east"))
        #expect(attached.status == 64 && attached.errors.contains("the table app.device is attached"), "\(attached)")
        let unknown = try move(Self.topic, "--to", "north", by: map("east"))
        #expect(
            unknown.status == 78 && unknown.errors.contains("the map has no database \"north\", but east, west"),
            "\(unknown)")
        let there = try move(Self.topic, "--to", "west", by: map("west"))
        #expect(there.status == 78 && there.errors.contains("the map leads to west already"), "\(there)")
        let typo = try move("com.example.ridr", "--to", "west", "--from", "east", by: map("east"))
        #expect(typo.status == 64 && typo.errors.contains("com.example.ridr is not known in east"), "\(typo)")
        let empty = try move(
            "\(TopicMap.bucket(of: "com.example.none"))", "--to", "east", "--from", "west", by: map("west"))
        #expect(empty.status == 78 && empty.errors.contains("there is no topic to move"), "\(empty)")
        let twice = try folder.write(
            """
            {"databases": {"east": "\(east.url(user: "a_operator"))", "west": "\(east.url(user: "a_reader"))"},
             "buckets": {"east": "0-1023"}}
            """, to: "twice.json")
        let same = try move(Self.topic, "--to", "west", "--from", "east", by: twice)
        #expect(same.status == 78 && same.errors.contains("east and west are the same database"), "\(same)")
        let bucket = try move("1024", "--to", "west", by: map("east"))
        #expect(bucket.status == 78 && bucket.errors.contains("bucket 1024: expected 0 to 1023"), "\(bucket)")
        let early = try move(Self.topic, "--to", "west", "--end", by: map("east"))
        #expect(early.status == 64 && early.errors.contains("is not in west yet"), "\(early)")
    }

    @Test func `what an earlier move has left behind is not believed`() throws {
        try east.psql("SELECT tokenkeeper.register('\(token(1))', '\(Self.topic)')", user: "a_app")
        #expect(try move(Self.topic, "--to", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        // It dies after the last deletion in the source.
        while try east.psql("SELECT tokenkeeper.end_move('\(Self.topic)')", user: "a_operator") != "0" {}
        #expect(try move(Self.topic, "--to", "east", "--from", "west", by: map("west")).status == 0)
        #expect(try move(Self.topic, "--to", "east", "--from", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "east", "--end", by: map("east")).status == 0)
        try east.psql("SELECT tokenkeeper.register('\(token(2))', '\(Self.topic)')", user: "a_app")
        #expect(try move(Self.topic, "--to", "west", by: map("east")).status == 0)
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        #expect(try west.psql("SELECT count(*) FROM tokenkeeper.token", user: "postgres") == "2")
    }

    @Test func `nothing in the queues is left behind, and nobody forgotten comes back`() throws {
        for number in 1...3 {
            try east.psql(
                "SELECT tokenkeeper.register('\(token(number))', '\(Self.topic)', user_id => 'u\(number)')",
                user: "a_app")
        }
        let facts = try east.psql(
            "SELECT facts FROM tokenkeeper.facts_of('\(Self.topic)', 'production', '', 10, false)", user: "a_operator")
        try west.psql("SELECT tokenkeeper.forget_user('u2')", user: "a_operator")
        try west.psql(
            """
            SELECT tokenkeeper.take_facts('east', '\(Self.topic)', 'production', false, '', decode('\(token(3))', 'hex'), $f$\(facts)$f$, NULL)
            """, user: "a_operator")
        #expect(
            try west.psql("SELECT string_agg(user_id, ',' ORDER BY user_id) FROM tokenkeeper.token", user: "postgres")
                == "u1,u3")
        #expect(try move(Self.topic, "--to", "west", by: map("west")).status == 0)
        try east.psql(
            "INSERT INTO tokenkeeper.registration (topic, token) VALUES ('\(Self.topic)', '\(token(4))')", user: "a_app"
        )
        let early = try move(Self.topic, "--to", "west", "--end", by: map("west"))
        #expect(
            early.status == 64 && early.errors.contains("east still has results and registrations in the queues: 1"),
            "\(early)")
        // A user's logout everywhere says nothing about a topic that is elsewhere.
        #expect(try east.psql("SELECT tokenkeeper.unregister(user_id => 'u1')", user: "a_app") == "0")
    }

    @Test func `a bucket moves with its topics, and with no other`() throws {
        let bucket = TopicMap.bucket(of: "com.example.one")
        for topic in ["com.example.one", "com.example.two", Self.topic] {
            try east.psql("SELECT tokenkeeper.register('\(token(1))', '\(topic)')", user: "a_app")
        }
        let others = "\(bucket == 0 ? "" : "0-\(bucket - 1),")\(bucket + 1)-1023"
        let (before, after) = (
            try map("east", buckets: ("0-1023", "")), try map("east", buckets: (others, "\(bucket)"))
        )
        let second = try #require((1...9999).map { "com.example.new\($0)" }.first { TopicMap.bucket(of: $0) == bucket })
        let first = try move("\(bucket)", "--to", "west", by: before)
        #expect(first.status == 0 && first.output.contains("bucket \(bucket) among those of west"), "\(first)")
        try east.psql("SELECT tokenkeeper.register('\(token(1))', '\(second)')", user: "a_app")
        for run in [
            try move("\(bucket)", "--to", "west", by: after),
            try move("\(bucket)", "--to", "west", "--end", by: after),
        ] {
            #expect(run.status == 0 && run.output.contains("com.example.one: "), "\(run)")
            #expect(run.output.split(separator: "\n").count == 2 && run.output.contains("\(second): "), "\(run)")
        }
        let topics = "SELECT string_agg(topic, ',' ORDER BY topic) FROM tokenkeeper.token"
        #expect(try east.psql(topics, user: "postgres") == "com.example.rider,com.example.two")
        #expect(
            try west.psql(topics, user: "postgres") == "\(["com.example.one", second].sorted().joined(separator: ","))")
    }
}
