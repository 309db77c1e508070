import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import tokenkeeperd

/// Three databases and a router in front of them, with PL/Proxy.
private struct Routed {
    static let topics = ["com.example.rider", "com.example.giant", "com.example.a", "com.example.b", "com.example.c"]
    static let split = "com.example.giant"

    let folder: TemporaryDirectory
    let map: String
    let names = ["east", "north", "west"]
    var databases: [TestDatabase]
    let router: TestDatabase

    init() throws {
        folder = try TemporaryDirectory()
        databases = try names.map { _ in try TestCluster.shared.database() }
        router = try TestCluster.shared.database(migrated: false)
        let roles = ["app", "sender", "reader"].map {
            """
            IF to_regrole('tokenkeeper_router_\($0)') IS NULL THEN
                CREATE ROLE tokenkeeper_router_\($0) LOGIN IN ROLE tokenkeeper_\($0), tokenkeeper_router;
            END IF;
            """
        }
        try router.psql(
            """
            DO $$ BEGIN
                IF to_regrole('tokenkeeper_router') IS NULL THEN CREATE ROLE tokenkeeper_router; END IF;
                \(roles.joined())
            END $$
            """, user: "postgres")
        let addresses = zip(names, databases).map { "\"\($0)\": \"\($1.url(user: "a_operator"))\"" }
        map = try folder.write(
            """
            {"databases": {\(addresses.joined(separator: ", "))}, "topics": {"com.example.rider": "north"},
             "split_by_device": ["\(Self.split)"], "buckets": {"east": "0-399", "north": "400-799", "west": "800-1023"}}
            """, to: "map.json")
        let made = try migrate()
        guard made.status == 0 else { throw TestFailure("\(made)") }
    }

    func migrate() throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "router", "migrate", "--database-url", router.url(user: "postgres")],
            environment: ["TOKENKEEPER_MAP_FILE": map])
    }

    /// Changes the map: the topic is in another database.
    func lead(_ topic: String, from: String, to: String) throws {
        let text = try String(contentsOfFile: map, encoding: .utf8)
            .replacing("\"\(topic)\": \"\(from)\"", with: "\"\(topic)\": \"\(to)\"")
        try text.write(toFile: map, atomically: true, encoding: .utf8)
    }

    /// Puts a restored database into the place of the lost one, and leads the router there.
    mutating func replace(_ lost: TestDatabase, with restored: TestDatabase) throws {
        let text = try String(contentsOfFile: map, encoding: .utf8).replacing(lost.name, with: restored.name)
        try text.write(toFile: map, atomically: true, encoding: .utf8)
        databases = databases.map { $0.name == lost.name ? restored : $0 }
        let made = try migrate()
        guard made.status == 0 else { throw TestFailure("\(made)") }
    }

    func move(_ topic: String, to target: String, _ more: String...) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "move", topic, "--to", target] + more, environment: ["TOKENKEEPER_MAP_FILE": map])
    }

    func database(of topic: String, device: String? = nil) throws -> TestDatabase? {
        guard case .to(let name) = try TopicMap(contentsOf: map).database(of: topic, device: device) else { return nil }
        return names.firstIndex(of: name).map { databases[$0] }
    }
}

@Suite(.ownThread) struct `A router` {
    /// A statement for the router, and the same for one database that has everything.
    private struct Step {
        var user: String
        var routed: String
        var alone: String
        /// The topic, if a client that reads the map can call its database instead.
        var topic: String?
    }

    /// Random calls. In the split topic, each token stays with one device: a device whose key changes is unregistered first.
    private struct Calls {
        var chance: SeededChance
        var moment = Date.now.addingTimeInterval(-864_000)

        mutating func number(_ end: Int) -> Int { Int(chance.next() % UInt64(end)) }

        mutating func maybe(_ text: String) -> String { number(3) == 0 ? "NULL" : text }

        mutating func instant() -> String {
            "'\(moment.addingTimeInterval(Double(number(800_000))).ISO8601Format())'"
        }

        mutating func token(in topic: String) -> (token: String, device: String) {
            let number = number(12)
            let token = String(format: "%064x", number + 1)
            return (token, topic == Routed.split ? "Device-\(number / 2)" : "device-\(self.number(5))")
        }

        func quoted(_ texts: [String]) -> String { "'{" + texts.joined(separator: ",") + "}'::text[]" }

        mutating func step() -> Step {
            let topic = Routed.topics[number(Routed.topics.count)]
            let isSplit = topic == Routed.split
            let (token, device) = token(in: topic)
            let user = "user-\(number(4))"
            let (known, at) = ("'\(token)', '\(topic)'", instant())
            let place = isSplit ? ", device_id => '\(device)'" : ""
            func both(_ user: String, _ call: String, topic: String? = nil) -> Step {
                Step(user: user, routed: call, alone: call, topic: topic)
            }
            let own = isSplit ? nil : topic
            switch number(9) {
            case 0...2:
                let who = isSplit ? "'\(device)'" : maybe("'\(device)'")
                let tag = quoted(["tag-\(number(3))"])
                let tags = maybe(tag)
                return both(
                    "a_app",
                    "SELECT tokenkeeper.register(\(known), 'production', \(at), \(who), \(tags), \(maybe("'\(user)'")))",
                    topic: own)
            case 3:
                let call = "SELECT tokenkeeper.unregister(\(known), 'production', \(at)"
                return Step(user: "a_app", routed: call + place + ")", alone: call + ")", topic: own)
            case 4:
                let of = number(2) == 0 ? "topic => '\(topic)', " : ""
                return both("a_app", "SELECT tokenkeeper.unregister(\(of)at => \(at), user_id => '\(user)')")
            case 5:
                let tags = "add => \(quoted(["added-\(number(3))"])), remove => \(quoted(["tag-0"]))"
                let whom = ["device_id => '\(device)'", "user_id => '\(user)'"][number(2)]
                return both("a_app", "SELECT tokenkeeper.tag('\(topic)', \(whom), \(tags))", topic: own)
            case 6: return both("a_app", registrations())
            case 7:
                let tokens = (1...12).map { String(format: "%064x", $0) }
                let (asked, devices) = (quoted(tokens), quoted((0..<12).map { "Device-\($0 / 2)" }))
                func call(_ arguments: String) -> String {
                    "SELECT array_agg(s ORDER BY s) FROM tokenkeeper.sendable(\(arguments), '\(topic)') AS s"
                }
                return Step(
                    user: "a_sender", routed: call(isSplit ? "\(asked), \(devices)" : asked), alone: call(asked),
                    topic: own)
            default: return result(topic, place)
            }
        }

        mutating func registrations() -> String {
            let rows = (0..<6).map { _ in
                let topic = Routed.topics[number(Routed.topics.count)]
                let (token, device) = token(in: topic)
                let user = "'user-\(number(4))'"
                return
                    "('\(token)', '\(topic)', NULL, \(instant()), '\(device)', NULL, \(maybe(user)), \(number(5) == 0))"
            }
            return "SELECT tokenkeeper.register(ARRAY[\(rows.joined(separator: ", "))]::tokenkeeper.new_registration[])"
        }

        mutating func result(_ topic: String, _ place: String) -> Step {
            let (token, device) = token(in: topic)
            let stale = moment.addingTimeInterval(Double(700_000 + number(160_000)))
            let milliseconds = Int64(stale.timeIntervalSince1970) * 1000
            if number(2) == 0 {
                let body = #"{"reason":"Unregistered","timestamp":\#(milliseconds)}"#
                let row = "('\(topic)', '\(token)', '410', '\(body)', NULL, NULL, NULL, '\(device)')"
                return Step(
                    user: "a_sender", routed: "SELECT tokenkeeper.report(ARRAY[\(row)]::tokenkeeper.new_result[])",
                    alone: "SELECT tokenkeeper.report(ARRAY[\(row)]::tokenkeeper.new_result[])")
            }
            let call = "SELECT tokenkeeper.report('\(topic)', '\(token)', 410, 'Unregistered', \(milliseconds)"
            let own = topic == Routed.split ? ", device_id => '\(device)'" : ""
            return Step(
                user: "a_sender", routed: call + own + ")", alone: call + ")",
                topic: topic == Routed.split ? nil : topic)
        }
    }

    @Test
    func `random calls through router and clients end as in one database, while topics move and daemons are killed`()
        throws
    {
        let routed = try Routed()
        let alone = try TestCluster.shared.database()
        var calls = Calls(chance: SeededChance(seed: Seed.next()))
        func daemon(_ database: TestDatabase) throws -> DaemonProcess {
            let name = zip(routed.names, routed.databases).first { $0.1.name == database.name }?.0 ?? "alone"
            return try database.daemon([
                "sweep.interval=off", "drain.poll_idle=50ms", "map.file=\(routed.map)", "map.database=\(name)",
            ])
        }
        let databases = routed.databases + [alone]
        var daemons = try databases.map(daemon)
        var isMoving = false
        func apply(_ steps: Int) throws {
            for number in 1...steps {
                let step = calls.step()
                let direct = try step.topic.flatMap { calls.number(2) == 0 ? try routed.database(of: $0) : nil }
                let left =
                    try direct?.psql(step.alone, user: step.user) ?? routed.router.psql(step.routed, user: step.user)
                let right = try alone.psql(step.alone, user: step.user)
                // A user's logout everywhere counts the tokens in both databases of a move.
                let isCounted = isMoving && step.routed.contains("unregister(at")
                #expect(left == right || isCounted, "step \(number): \(step.routed)")
                // The daemons record it: what the next calls answer depends on it.
                if step.routed.contains(".report(") { for database in databases { try Self.settle(database) } }
                if calls.number(60) == 0 {
                    let killed = calls.number(daemons.count)
                    daemons[killed].signal(SIGKILL)
                    _ = daemons[killed].wait()
                    daemons[killed] = try daemon(databases[killed])
                }
            }
        }
        let steps = Soak.isWhole ? 1500 : 60
        try apply(steps)
        var owner = "north"
        for target in ["west", "east"] {
            isMoving = true
            #expect(try routed.move("com.example.rider", to: target).status == 0)
            try apply(steps)
            try routed.lead("com.example.rider", from: owner, to: target)
            #expect(try routed.migrate().status == 0)
            let moved = try routed.move("com.example.rider", to: target)
            #expect(moved.status == 0 && moved.output.contains("\(target) has it now"), "\(moved)")
            try apply(steps)
            for database in databases { try Self.settle(database) }
            #expect(try routed.move("com.example.rider", to: target, "--end").status == 0)
            (owner, isMoving) = (target, false)
        }
        for database in databases { try Self.settle(database) }
        let ledger = """
            SELECT concat_ws('|', t.topic, t.token, t.state, t.registered_at, t.invalidated_at, t.reason, t.device_id, t.tags, t.user_id)
            FROM tokenkeeper.token AS t
            """
        func lines(_ database: TestDatabase) throws -> [String] {
            try database.psql(ledger, user: "postgres").split(separator: "\n").map(String.init)
        }
        let expected = try lines(alone).sorted()
        #expect(try routed.databases.flatMap(lines).sorted() == expected)
        #expect(expected.count > 40 && expected.contains { $0.contains("|stale|") }, "\(expected)")
        // Each is where the map says.
        for database in routed.databases {
            for topic in try database.psql("SELECT DISTINCT topic FROM tokenkeeper.token", user: "postgres").split(
                separator: "\n")
            where topic != Routed.split {
                #expect(try routed.database(of: String(topic))?.name == database.name)
            }
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a database that is restored equals that database restored alone`() throws {
        var routed = try Routed()
        let alone = try TestCluster.shared.database()
        var calls = Calls(chance: SeededChance(seed: Seed.next()))
        /// What the calls meet: the fleet, and databases that have everything.
        func apply(_ steps: Int, to whole: [TestDatabase]) throws {
            var daemons = try (routed.databases + whole).map {
                try $0.daemon(["sweep.interval=off", "drain.poll_idle=50ms"])
            }
            for _ in 1...steps {
                let step = calls.step()
                let direct = try step.topic.flatMap { calls.number(2) == 0 ? try routed.database(of: $0) : nil }
                _ = try direct?.psql(step.alone, user: step.user) ?? routed.router.psql(step.routed, user: step.user)
                for database in whole { _ = try database.psql(step.alone, user: step.user) }
                if step.routed.contains(".report(") {
                    for database in routed.databases + whole { try Self.settle(database) }
                }
            }
            for database in routed.databases + whole { try Self.settle(database) }
            while let daemon = daemons.popLast() { #expect(daemon.stop() == 0) }
        }
        let steps = Soak.isWhole ? 1000 : 80
        try apply(steps, to: [alone])
        let lost = routed.databases[1]
        let backups = try [lost, alone].map { try Backup(of: $0, in: routed.folder) }
        try apply(steps, to: [alone])
        let atTheLoss = try Self.ledger(lost)
        let restored = try backups.map { try $0.restored() }
        try routed.replace(lost, with: restored[0])
        #expect(try Self.ledger(restored[0]) != atTheLoss)
        try apply(steps, to: [alone, restored[1]])

        func isOfTheRestored(_ line: [String: String]) throws -> Bool {
            try routed.database(of: line["topic"]!, device: line["device"]!)?.name == restored[0].name
        }
        let expected =
            try Self.ledger(restored[1]).filter { try isOfTheRestored($0) }
            + Self.ledger(alone).filter { try !isOfTheRestored($0) }
        let found = try routed.databases.flatMap(Self.ledger)
        #expect(Set(found) == Set(expected) && found.count == expected.count)
        #expect(try found.filter { try isOfTheRestored($0) }.count > 8 && found.count > 30)
    }

    /// What `pg_dump` has written of a database.
    private struct Backup {
        let database: TestDatabase
        let file: String

        init(of database: TestDatabase, in folder: TemporaryDirectory) throws {
            self.database = database
            file = folder.path + "/" + database.name
            _ = try TestCluster.run(["pg_dump", "-Fc", "-f", file, "-d", database.url(user: "postgres")])
        }

        func restored() throws -> TestDatabase {
            let new = try TestCluster.shared.database(migrated: false)
            _ = try TestCluster.run(["pg_restore", "--exit-on-error", "-d", new.url(user: "postgres"), file])
            return new
        }
    }

    private static func ledger(_ database: TestDatabase) throws -> [[String: String]] {
        let columns = ["topic", "token", "state", "registered", "invalidated", "reason", "device", "tags", "of_user"]
        return try database.psql(
            """
            SELECT concat_ws('|', topic, token, state, registered_at, coalesce(invalidated_at::text, ''), coalesce(reason, ''),
                             coalesce(device_id, ''), coalesce(tags::text, ''), coalesce(user_id, ''))
            FROM tokenkeeper.token
            """, user: "postgres"
        ).split(separator: "\n").map { line in
            Dictionary(
                uniqueKeysWithValues: zip(
                    columns, line.split(separator: "|", omittingEmptySubsequences: false).map(String.init)))
        }
    }

    private static func settle(_ database: TestDatabase) throws {
        try eventually("the queues are empty") {
            try database.psql(
                """
                SELECT (SELECT count(*) FROM tokenkeeper.send_result) + (SELECT count(*) FROM tokenkeeper.registration)
                     + (SELECT count(*) FROM tokenkeeper.moved_row)
                """, user: "postgres") == "0"
        }
    }

    @Test func `a topic that is split needs the device`() throws {
        let routed = try Routed()
        let token = String(repeating: "ab", count: 32)
        for call in [
            "register('\(token)', '\(Routed.split)')", "unregister('\(token)', '\(Routed.split)')",
            "tag('\(Routed.split)', token => '\(token)', add => '{x}')",
        ] {
            let error = #expect(throws: (any Error).self) {
                try routed.router.psql("SELECT tokenkeeper.\(call)", user: "a_app")
            }
            #expect("\(error as Any)".contains("com.example.giant is split by device: name the device"), "\(call)")
        }
        for call in [
            "is_sendable('\(token)', '\(Routed.split)')", "sendable(ARRAY['\(token)'], '\(Routed.split)')",
            "report('\(Routed.split)', '\(token)', 200)",
        ] {
            #expect(throws: (any Error).self) { try routed.router.psql("SELECT tokenkeeper.\(call)", user: "a_sender") }
        }
        // The same device in another spelling.
        let register = "SELECT tokenkeeper.register('\(token)', '\(Routed.split)', device_id => '%')"
        for device in ["4F7A3C4B-3B6B-4BD1-9C11-0123456789AB", "4f7a3c4b-3b6b-4bd1-9c11-0123456789ab"] {
            try routed.router.psql(register.replacingOccurrences(of: "%", with: device), user: "a_app")
        }
        let tokens = try routed.databases.map {
            try $0.psql("SELECT count(*) FROM tokenkeeper.ledger", user: "postgres")
        }
        #expect(tokens.sorted() == ["0", "0", "1"])
        #expect(
            try routed.router.psql(
                "SELECT tokenkeeper.tag('\(Routed.split)', token => '\(token)', device_id => '4F7A3C4B-3B6B-4BD1-9C11-0123456789AB', add => '{x}')",
                user: "a_app") == "1")
    }

    @Test func `a campaign belongs to the router's login, and one of a split topic is completed by repeating it`()
        throws
    {
        let routed = try Routed()
        for number in 0..<12 {
            try routed.router.psql(
                "SELECT tokenkeeper.register('\(String(format: "%064x", number))', '\(Routed.split)', device_id => 'd\(number)')",
                user: "a_app")
        }
        let enqueue = """
            tokenkeeper.enqueue_everywhere('{"aps":{"alert":"Hello"}}', '\(Routed.split)', 'key', everyone => true, confirm => true)
            """
        #expect(throws: (any Error).self) {
            try routed.router.psql(
                "SELECT tokenkeeper.enqueue('{}', '\(Routed.split)', everyone => true)", user: "a_sender")
        }
        // One database refuses it at first.
        try routed.databases[1].psql(
            "REVOKE EXECUTE ON FUNCTION tokenkeeper.act_for FROM tokenkeeper_sender", user: "owner")
        #expect(throws: (any Error).self) { try routed.router.psql("SELECT * FROM \(enqueue)", user: "a_sender") }
        try routed.databases[1].psql(
            "GRANT EXECUTE ON FUNCTION tokenkeeper.act_for TO tokenkeeper_sender", user: "owner")
        let first = try routed.router.psql("SELECT * FROM \(enqueue) ORDER BY 1", user: "a_sender")
        #expect(first.split(separator: "\n").map { $0.prefix { $0 != "|" } } == ["east", "north", "west"])
        #expect(try routed.router.psql("SELECT * FROM \(enqueue) ORDER BY 1", user: "a_sender") == first)
        for database in routed.databases {
            #expect(
                try database.psql("SELECT string_agg(created_by, ',') FROM tokenkeeper.campaign", user: "postgres")
                    == "a_sender")
        }
        let own = "SELECT count(*) FROM tokenkeeper.campaigns()"
        #expect(try routed.router.psql(own, user: "a_sender") == "3")
        let other = "other_\(routed.router.name)"
        try routed.router.psql("CREATE ROLE \(other) LOGIN IN ROLE tokenkeeper_sender", user: "postgres")
        defer { _ = try? routed.router.psql("DROP ROLE \(other)", user: "postgres") }
        #expect(try routed.router.psql(own, user: other) == "0")
        // In a database, nobody but a router acts for others.
        let database = routed.databases[0]
        #expect(
            try database.psql(
                "BEGIN; SELECT tokenkeeper.act_for('a_sender'); SELECT count(*) FROM tokenkeeper.campaign_progress; COMMIT",
                user: other
            ).hasSuffix("0"))
    }

    @Test func `a login has the rights of its groups, and none on what is internal`() throws {
        let routed = try Routed()
        let refused = [
            ("a_app", "is_sendable('ab', 't')"), ("a_sender", "register('ab', 't')"), ("a_sender", "all_status()"),
            ("a_app", "forget_user('u')"), ("a_reader", "forget_user('u')"), ("a_sender", "all_campaigns('a_app')"),
            ("a_app", "unregister_all('t', 'production', now(), 'u')"),
            ("a_sender", "report_in('{}', '{}', '{}', '{}', '{}', '{}', '{}', 0)"),
        ]
        for (user, call) in refused where !(user == "a_app" && call.hasPrefix("forget")) {
            let error = #expect(throws: (any Error).self) {
                try routed.router.psql("SELECT tokenkeeper.\(call)", user: user)
            }
            #expect("\(error as Any)".contains("permission denied"), "\(user) \(call)")
        }
        #expect(
            try routed.router.psql(
                "SELECT string_agg(database, ',' ORDER BY database) FROM tokenkeeper.forget_user('u')", user: "a_app")
                == "east,north,west")
        #expect(
            try routed.router.psql(
                "SELECT count(status ->> 'queue_depth') FROM tokenkeeper.all_status()", user: "a_reader") == "3")
        // No function runs code that is found by the path of its caller.
        #expect(
            try routed.router.psql(
                """
                SELECT string_agg(p.proname, ',') FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace
                AND (p.proconfig IS NULL OR NOT 'search_path=pg_catalog, pg_temp' = ANY (p.proconfig)) AND p.proname NOT IN ('is_split', 'bucket', 'place')
                """, user: "postgres") == "")
        #expect(
            try routed.router.psql(
                "SELECT count(*) FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL",
                user: "postgres") == "0")
    }

    @Test func `it is made anew, and never over a ledger or what others have built`() throws {
        let routed = try Routed()
        #expect(try routed.migrate().output == "this database is a router for 3 databases\n")
        try routed.router.psql("CREATE VIEW mine AS SELECT tokenkeeper.place('t') AS place", user: "postgres")
        let refused = try routed.migrate()
        #expect(refused.status == 69 && refused.errors.contains("view public.mine"), "\(refused)")
        try routed.router.psql("DROP VIEW mine", user: "postgres")
        let ledger = try ProgramRun(
            [DaemonProcess.program, "router", "migrate", "--database-url", routed.databases[0].url(user: "postgres")],
            environment: ["TOKENKEEPER_MAP_FILE": routed.map])
        #expect(ledger.status == 69 && ledger.errors.contains("this database has a ledger"), "\(ledger)")
        let printed = try ProgramRun(
            [DaemonProcess.program, "router", "migrate", "--print"], environment: ["TOKENKEEPER_MAP_FILE": routed.map])
        #expect(printed.status == 0 && printed.output.hasPrefix("BEGIN;\n") && !printed.output.contains("{owners}"))
    }
}
