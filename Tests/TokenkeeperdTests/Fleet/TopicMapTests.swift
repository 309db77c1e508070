import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `The map of databases` {
    static let text = """
        {
          "databases": {"east": "host=/tmp dbname=east", "west": "postgresql:///west?host=/tmp", "north": "dbname=north"},
          "topics": {"com.example.rider": "north"},
          "split_by_device": ["com.example.giant"],
          "buckets": {"east": "0-511,1023", "west": "512-600,602-1022,601"}
        }
        """

    private static func problems(_ text: String) -> [String] {
        do {
            _ = try TopicMap(text.utf8)
            return []
        } catch {
            return error.problems
        }
    }

    @Test func `a topic has its own database, or that of its bucket, and a split one that of its device`() throws {
        let map = try TopicMap(Self.text.utf8)
        #expect(map.database(of: "com.example.rider") == .to("north"))
        #expect(map.database(of: "com.example.giant") == .byDevice)
        #expect(map.database(of: "com.example.giant", device: "") == .byDevice)
        #expect(map.holders(of: "com.example.giant") == ["east", "west"])
        // sha256sum of the text: 8a46…, and 0x8a46 % 1024 is 582.
        #expect(TopicMap.bucket(of: "com.example.app") == 582)
        let devices = (0..<200).map { map.database(of: "com.example.giant", device: "device \($0)") }
        #expect(devices.contains(.to("east")) && devices.contains(.to("west")))
        #expect(
            TopicMap.bucket(of: "t", device: "4F7A3C4B-AAAA-BBBB-CCCC-0123456789AB")
                == TopicMap.bucket(of: "t", device: "4f7a3c4b-aaaa-bbbb-cccc-0123456789ab"))
    }

    @Test(arguments: [
        ("[]", "the map is of another type than expected"), ("{", "no JSON object with databases and buckets"),
        (#"{"databases": {"a": 3}}"#, "databases.a is of another type than expected"),
        (#"{"databases": {}, "buckets": {}}"#, "the map has no databases"),
        (#"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1022"}}"#, "bucket 1023 is in no database"),
        (
            #"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1023", "b": "7"}}"#,
            "buckets: b is no database of the map"
        ),
        (#"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1024"}}"#, "buckets of a: expected numbers and ranges"),
        (#"{"databases": {"a": "dbname=a"}, "buckets": {"a": "5-1"}}"#, "buckets of a: expected numbers and ranges"),
        (#"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1023,5"}}"#, "bucket 5 is in a and in a"),
        (
            #"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1023"}, "topics": {"t": "b"}}"#,
            "topic t is in b, which is no database of the map"
        ),
        (
            #"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1023"}, "topics": {"t": "a"}, "split_by_device": ["t"]}"#,
            "topic t is split by device, and is in a"
        ),
        (
            #"{"databases": {"a": "dbname=a"}, "buckets": {"a": "0-1023"}, "bucket": 3}"#,
            #""bucket" is no part of a map"#
        ),
        (
            #"{"databases": {"a": "dbname=a password=secret"}, "buckets": {"a": "0-1023"}}"#,
            "database a: a map has no passwords: use passfile=, or ~/.pgpass"
        ),
        (#"{"databases": {"a": "xyz"}, "buckets": {"a": "0-1023"}}"#, "database a: not a connection string"),
        (#"{"databases": {"a b": "dbname=a"}, "buckets": {"a b": "0-1023"}}"#, #""a b" is no name of a database"#),
    ])
    func `what is wrong is said`(text: String, problem: String) {
        let problems = Self.problems(text)
        #expect(problems.contains { $0.hasPrefix(problem) }, "\(problems)")
        #expect(!problems.joined().contains("secret"))
    }

    @Test func `clients in Python and SQL read the map alike`() throws {
        let folder = try TemporaryDirectory()
        let file = try folder.write(Self.text, to: "map.json")
        let map = try TopicMap(Self.text.utf8)
        var chance = SeededChance(seed: Seed.next())
        let letters = Array("abcXYZ0-_. :/é漢😀'\\\"")
        func word() -> String {
            String((0...chance.next() % 20).map { _ in letters[Int(chance.next() % UInt64(letters.count))] })
        }
        let pairs = (0..<300).map { number in
            number % 3 == 0 ? ["com.example.giant", word()] : [number == 1 ? "com.example.rider" : word(), word()]
        }
        let expected = pairs.map { pair in
            switch map.database(of: pair[0], device: pair[1]) {
            case .to(let name): name
            case .byDevice: "by device"
            }
        }
        let json = String(decoding: try JSONEncoder().encode(pairs), as: UTF8.self)
        let python = try ProgramRun(
            [
                "python3", "-c",
                """
                import json, sys
                from tokenkeeper_map import TopicMap
                topics = TopicMap(sys.argv[1])
                print("\\n".join(topics.database(topic, device) for topic, device in json.loads(sys.argv[2])))
                try: topics.database("com.example.giant")
                except ValueError: print("by device")
                """, file, json,
            ], environment: ["PYTHONPATH": PackagedProgram.repository.appendingPathComponent("clients/python").path])
        #expect(python.output.split(separator: "\n").map(String.init) == expected + ["by device"], "\(python.errors)")

        let database = try TestCluster.shared.database()
        let sql = PackagedProgram.repository.appendingPathComponent("clients/sql/tokenkeeper_map.sql")
        try database.psql(String(contentsOf: sql, encoding: .utf8), user: "postgres")
        func quoted(_ text: String) -> String { "'" + text.replacingOccurrences(of: "'", with: "''") + "'" }
        let found = try database.psql(
            """
            SELECT tokenkeeper_database(\(quoted(Self.text)), p.pair ->> 0, p.pair ->> 1)
            FROM jsonb_array_elements(\(quoted(json))) WITH ORDINALITY AS p (pair, n) ORDER BY p.n
            """, user: "postgres")
        #expect(found.split(separator: "\n").map(String.init) == expected)
    }
}
