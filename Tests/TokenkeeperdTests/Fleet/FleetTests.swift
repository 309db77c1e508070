import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `A command on several databases` {
    private let folder: TemporaryDirectory
    private let (east, west): (TestDatabase, TestDatabase)
    private let map: String

    init() throws {
        folder = try TemporaryDirectory()
        east = try TestCluster.shared.database()
        west = try TestCluster.shared.database()
        map = try Self.write(["east": east.url(user: "a_operator"), "west": west.url(user: "a_operator")], to: folder)
    }

    private static func write(_ databases: [String: String], to folder: TemporaryDirectory) throws -> String {
        let parts = databases.map { "\"\($0)\": \"\($1)\"" }.joined(separator: ", ")
        return try folder.write(
            """
            {"databases": {\(parts)}, "topics": {"com.example.rider": "west"}, "split_by_device": ["com.example.giant"],
             "buckets": {"east": "0-511", "west": "512-1023"}}
            """, to: "map.json")
    }

    private func run(_ arguments: String..., map: String? = nil) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program] + arguments, environment: ["TOKENKEEPER_MAP_FILE": map ?? self.map])
    }

    /// A topic that is unknown, and has no request, is not paused.
    private func knowRider() throws {
        for database in [east, west] {
            try database.psql(
                "INSERT INTO tokenkeeper.topic_policy (topic) VALUES ('com.example.rider')", user: "a_operator")
        }
    }

    @Test func `a topic is paused on all, or on one`() throws {
        try knowRider()
        let paused = try run("--all", "topic", "pause", "com.example.rider")
        #expect(paused.status == 0, "\(paused)")
        for name in ["east", "west"] {
            #expect(paused.output.contains("\(name)\n  sending to com.example.rider (production) is paused\n"))
        }
        #expect(paused.output.hasSuffix("\n2 of 2 databases: done\n"))
        // The option may stand behind the command, too.
        let resumed = try run("topic", "resume", "--on=west", "com.example.rider")
        #expect(
            resumed.output == "west\n  sending to com.example.rider (production) goes on\n\n1 of 1 database: done\n")
        #expect(try east.psql("SELECT topic FROM tokenkeeper.paused_topic", user: "postgres") == "com.example.rider")
        #expect(try west.psql("SELECT topic FROM tokenkeeper.paused_topic", user: "postgres") == "")
    }

    @Test func `a database that hangs is named, and the others have done it before`() throws {
        let silent = try LoopbackListener()
        let map = try Self.write(
            [
                "east": east.url(user: "a_operator"), "west": west.url(user: "a_operator"),
                "frozen": "postgresql://a_operator@127.0.0.1:\(silent.port)/postgres",
            ], to: folder)
        try knowRider()
        let paused = try run("topic", "pause", "com.example.rider", "--all", "--time-limit", "3s", map: map)
        #expect(paused.status == 69, "\(paused)")
        #expect(paused.output.hasSuffix("frozen\n  no answer within 3s\n\n2 of 3 databases: done; no answer: frozen\n"))
        for database in [east, west] {
            #expect(try database.psql("SELECT count(*) FROM tokenkeeper.paused_topic", user: "postgres") == "1")
        }
        let json = try run("--all", "status", "--json", "--time-limit=8s", map: map)
        #expect(json.status == 69)
        let lines = try json.output.split(separator: "\n").map {
            try #require(JSONSerialization.jsonObject(with: Data($0.utf8)) as? [String: Any])
        }
        #expect(Set(lines.compactMap { $0["database"] as? String }) == ["east", "west", "frozen"])
        for line in lines {
            let result = line["result"] as? [String: Any]
            #expect((result?["queue_depth"] as? Int) == (line["database"] as? String == "frozen" ? nil : 0), "\(line)")
        }
    }

    @Test func `status and doctor name topics that the map leads elsewhere`() throws {
        #expect(try run("--all", "status").output.contains("the map leads") == false)
        for topic in ["com.example.rider", "com.example.giant"] {
            try east.psql("SELECT tokenkeeper.register(repeat('ab', 32), '\(topic)')", user: "postgres")
        }
        let words = "the map leads to other databases for topics that are in east: com.example.rider (west)"
        let status = try run("--all", "status")
        #expect(status.status == 0 && status.output.contains("  warning: \(words)\n"), "\(status)")
        let json = try run("--on", "east", "status", "--json")
        #expect(json.output.contains("\"\(words)\""))
        #expect(try run("--all", "doctor").output.contains(words))
        // Of one database, with its name.
        let one = try ProgramRun(
            [
                DaemonProcess.program, "status", "--set", "map.database=east", "--database-url",
                east.url(user: "a_reader"),
            ],
            environment: ["TOKENKEEPER_MAP_FILE": map])
        #expect(one.output.contains(words), "\(one)")
    }

    @Test func `each command for an operator runs on all databases`() throws {
        for database in [east, west] {
            try database.psql(
                """
                SELECT tokenkeeper.register(repeat('ab', 32), 'com.example.rider', user_id => 'u'),
                       tokenkeeper.enqueue('{"aps":{"alert":"x"}}', 'com.example.rider', everyone => true, name => 'news')
                """, user: "postgres")
        }
        let daemons = try [east, west].map { try $0.daemon(["sweep.interval=off"]) }
        for (arguments, words) in [
            (["explain", String(repeating: "ab", count: 32)], "may be sent to"), (["campaign", "list"], "news"),
            (["held", "list"], "nothing is held"),
            (["rejected", "list"], "nothing is rejected"),
            (
                ["reinstate", "--topic", "com.example.rider", "--since", "2026-01-01T00:00:00Z", "--dry-run"],
                "0 tokens would be sendable again"
            ),
            (["sweep", "--dry-run"], "would delete 0 old sweep runs"),
            (["forget", "--user", "u", "--dry-run"], "would be deleted"),
            (["forget", "--user", "u"], "deleted; a running daemon drops what is queued"),
        ] {
            let done = try ProgramRun(
                [DaemonProcess.program, "--all"] + arguments, environment: ["TOKENKEEPER_MAP_FILE": map])
            #expect(done.status == 0 && done.output.hasSuffix("2 of 2 databases: done\n"), "\(done)")
            #expect(done.output.components(separatedBy: words).count == 3, "\(words): \(done)")
        }
        #expect(try east.psql("SELECT count(*) FROM tokenkeeper.token", user: "postgres") == "0")
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a person is forgotten from a shell`() throws {
        func forget(_ arguments: String...) throws -> ProgramRun {
            try ProgramRun(
                [DaemonProcess.program, "forget"] + arguments,
                environment: ["TOKENKEEPER_DATABASE_URL": east.url(user: "a_app")])
        }
        for number in 1...4 {
            try east.psql(
                "SELECT tokenkeeper.register(repeat('a\(number)', 32), 't', device_id => 'd\(number)', user_id => 'u\(number)')",
                user: "a_app")
        }
        let tokens = "SELECT string_agg(device_id, ',' ORDER BY device_id) FROM tokenkeeper.token"
        #expect(try forget("--user", "u1", "--dry-run").output.hasSuffix(" would be deleted\n"))
        #expect(try east.psql(tokens, user: "postgres") == "d1,d2,d3,d4")
        for which in [["--user", "u1"], ["--device", "d2"], ["--token", String(repeating: "A3", count: 32)]] {
            #expect(try forget(which[0], which[1]).status == 0)
        }
        #expect(try east.psql(tokens, user: "postgres") == "d4")
        #expect(try forget("--user", "u1").output == "0 rows were deleted; a running daemon drops what is queued\n")
        let malformed = try forget("--token", "xyz")
        #expect(malformed.status == 64 && malformed.errors.contains("token is 'xyz'"), "\(malformed)")
        #expect(try forget().status == 64)
        #expect(try forget("--user", "u", "--device", "d").status == 64)
    }

    @Test(arguments: [
        (["--all"], "expected a command"), (["--all", "run"], "expected a command"),
        (["--all", "import", "f"], "expected a command"),
        (["--all", "--on", "east", "status"], "expected --all or --on, not both"),
        (["--time-limit", "3s", "status"], "only for --all and --on"),
        (["--all", "--time-limit", "3", "status"], "--time-limit is 3, expected a duration"),
        (["--all", "status", "--watch"], "--watch draws one database"),
        (["--all", "status", "--database-url", "dbname=a"], "leave out --database-url"),
        (["--all", "campaign", "pause", "3"], "name the database with --on"), (["--all", "status", "--jsn"], "--jsn"),
        (["--on", "south", "status"], "has no database \"south\", but east, west"),
    ])
    func `what is wrong is said once`(arguments: [String], problem: String) throws {
        let refused = try ProgramRun(
            [DaemonProcess.program] + arguments, environment: ["TOKENKEEPER_MAP_FILE": map])
        #expect(refused.status == (arguments.contains("south") ? 78 : 64), "\(refused)")
        #expect(refused.errors.components(separatedBy: problem).count == 2, "\(refused)")
    }

    @Test func `map prints the database of a topic`() throws {
        #expect(try run("map", "com.example.rider").output == "west\n")
        #expect(
            try run("map").output.hasPrefix(
                "east  512 of 1024 buckets\nwest  512 of 1024 buckets, and com.example.rider\n"))
        let split = try run("map", "com.example.giant")
        #expect(split.status == 64 && split.errors.contains("name one with --device"))
        #expect(try run("map", "com.example.giant", "--device", "1").status == 0)
        let none = try ProgramRun([DaemonProcess.program, "map"])
        #expect(none.status == 78 && none.errors.contains("set map.file, or TOKENKEEPER_MAP_FILE"))
        try "{}".write(toFile: map, atomically: true, encoding: .utf8)
        let wrong = try run("--all", "status")
        #expect(wrong.status == 78 && wrong.errors.contains("the map has no databases"))
    }
}
