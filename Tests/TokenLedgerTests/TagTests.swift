import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

private let misleading = "a character that looks like a blank, a quotation mark or an operator "

@Suite(.ownThread) struct `Tags and their expressions` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let tags = [
        "a", "A", "lang:cs", "it's", "back\\slash", "two words", "q\"q", "č", "(&&)", ":*", "-x", "a.b_c@d#e",
    ]

    indirect enum Expression {
        case tag(String)
        case not(Expression)
        case and(Expression, Expression)
        case or(Expression, Expression)

        static func random(depth: Int, _ chance: inout SeededChance) -> Self {
            switch depth == 0 ? 0 : Int.random(in: 0..<5, using: &chance) {
            case 0, 1: .tag(tags.randomElement(using: &chance)!)
            case 2: .not(random(depth: depth - 1, &chance))
            case 3: .and(random(depth: depth - 1, &chance), random(depth: depth - 1, &chance))
            default: .or(random(depth: depth - 1, &chance), random(depth: depth - 1, &chance))
            }
        }

        func matches(_ set: Set<String>) -> Bool {
            switch self {
            case .tag(let tag): set.contains(tag)
            case .not(let inner): !inner.matches(set)
            case .and(let left, let right): left.matches(set) && right.matches(set)
            case .or(let left, let right): left.matches(set) || right.matches(set)
            }
        }

        private var strength: Int {
            switch self {
            case .tag, .not: 3
            case .and: 2
            case .or: 1
            }
        }

        /// With parentheses only where they are needed, and sometimes elsewhere; with and without blanks.
        func text(_ chance: inout SeededChance) -> String {
            func inner(_ other: Expression, _ wanted: Int, _ chance: inout SeededChance) -> String {
                let text = other.text(&chance)
                return other.strength < wanted || Int.random(in: 0..<6, using: &chance) == 0 ? "(\(text))" : text
            }
            let blank = ["", " ", "  "].randomElement(using: &chance)!
            switch self {
            case .tag(let tag):
                let isBare = tag.allSatisfy { $0.isLetter || $0.isNumber || "_@#.:-".contains($0) }
                return isBare && Bool.random(using: &chance) ? tag : "\"" + tag.replacing("\"", with: "\"\"") + "\""
            case .not(let other): return "!" + blank + inner(other, 3, &chance)
            case .and(let left, let right):
                return inner(left, 2, &chance) + blank + "&&" + blank + inner(right, 2, &chance)
            case .or(let left, let right):
                return inner(left, 1, &chance) + blank + "||" + blank + inner(right, 1, &chance)
            }
        }
    }

    @Test func `10,000 random expressions match what a model says`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var owner = try database.connect()
        for _ in 0..<10 {
            var expressions: [String] = []
            var sets: [String] = []
            var wanted: [Bool] = []
            for _ in 0..<1_000 {
                let expression = Expression.random(depth: 5, &chance)
                let tags = Self.tags.filter { _ in Int.random(in: 0..<3, using: &chance) == 0 }
                expressions.append(expression.text(&chance))
                let quoted = tags.map { "\"" + $0.replacing("\\", with: "\\\\").replacing("\"", with: "\\\"") + "\"" }
                // Null is the same as no tags.
                sets.append(tags.isEmpty && Bool.random(using: &chance) ? "NULL" : "{\(quoted.joined(separator: ","))}")
                wanted.append(expression.matches(Set(tags)))
            }
            let found = try owner.query(
                """
                SELECT tokenkeeper.tag_vector(nullif(u.tags, 'NULL')::text[]) @@ tokenkeeper.tag_query(u.expression)
                FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS u (expression, tags, n) ORDER BY u.n
                """, [.texts(expressions), .texts(sets)]
            ).decode { row throws(DatabaseError) in try row.read(Bool.self) }
            #expect(found.count == wanted.count, "seed \(seed)")
            let wrong = zip(zip(expressions, sets), zip(found, wanted)).first { $1.0 != $1.1 }
            #expect(wrong == nil, "seed \(seed)")
        }
    }

    @Test(arguments: [
        ("", "its end at position 1, expected a tag, ! or ("),
        ("a &&  ", "its end at position 7, expected a tag, ! or ("),
        ("a & b", "'&' at position 3, expected &&, || or the end"),
        ("čš && && b", "'&&' at position 7, expected a tag, ! or ("),
        ("a b", "'b' at position 3, expected &&, || or the end"),
        ("((a) || b", "its end at position 10, expected &&, || or the ) of the parenthesis at position 1"),
        ("a)", "')' at position 2, expected &&, || or the end"),
        ("()", "')' at position 2, expected a tag, ! or ("),
        ("a || \"b", "a double quote without its end at position 6, expected a tag, ! or ("),
        ("\"\"", "a tag of 0 bytes at position 1, expected 1 to 512"),
        ("x || " + String(repeating: "y", count: 513), "a tag of 513 bytes at position 6, expected 1 to 512"),
        ("World && !muted\u{A0}", misleading + "at position 16, expected double quotes around such a tag"),
        ("č && !“muted”", misleading + "at position 7, expected double quotes around such a tag"),
        ("\u{200B}a", misleading + "at position 1, expected double quotes around such a tag"),
        ("a && ！b", misleading + "at position 6, expected double quotes around such a tag"),
        (String(repeating: "(", count: 101) + "a", "101 nested parentheses at position 101, expected at most 100"),
        ("a" + String(repeating: "||a", count: 1_000), "its 1001st tag at position 3001, expected at most 1000"),
    ])
    func `an invalid expression is refused with the position`(expression: String, error: String) throws {
        var owner = try database.connect()
        let found = #expect(throws: DatabaseError.self) {
            try owner.run("SELECT tokenkeeper.tag_query('\(expression)')")
        }
        #expect(
            found?.sqlState == "22023" && found?.message.contains("the tag expression has \(error)") == true,
            "\(found?.message ?? "")")
    }

    @Test func `the longest and deepest expressions are understood`() throws {
        var owner = try database.connect()
        let tag = String(repeating: "t", count: 512)
        let long = (0..<120).map { "\(tag.dropLast(3))\(100 + $0)" }.joined(separator: " && ")
        let deep = String(repeating: "!(", count: 100) + "a" + String(repeating: ")", count: 100)
        let many = "a" + String(repeating: "&&a", count: 999)
        let not = String(repeating: "!", count: 65_534) + "a"
        for (expression, matches) in [(long, "f"), (deep, "t"), (many, "t"), (not, "t")] {
            #expect(
                try owner.scalar("SELECT tokenkeeper.tag_vector('{a}') @@ tokenkeeper.tag_query('\(expression)')")
                    == matches)
        }
        // As many and as long tags as a token may have.
        #expect(
            try owner.scalar(
                """
                SELECT length(tokenkeeper.tag_vector(ARRAY(SELECT repeat('t', 508) || n FROM generate_series(1000, 1999) AS n)))
                """) == "1000")
    }

    @Test func `an expression that one in a thousand matches uses the index`() throws {
        var owner = try database.connect()
        try owner.run("SELECT tokenkeeper.register('aa', 't')")
        try owner.run(
            """
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, tags, tags_at)
            SELECT t.topic_id, decode(lpad(to_hex(n), 8, '0'), 'hex'), now(),
                   ARRAY['team' || n % 1000, CASE WHEN n % 3 = 0 THEN 'muted' ELSE 'all' END], now()
            FROM tokenkeeper.topic AS t, generate_series(1, 100000) AS n
            """)
        try owner.run("ANALYZE tokenkeeper.ledger")
        func plan(_ expression: String, _ more: String) throws -> String {
            try owner.lines(
                """
                EXPLAIN SELECT l.token_key FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = 1 AND tokenkeeper.tag_vector(l.tags) @@ tokenkeeper.tag_query('\(expression)') \(more)
                """, columns: 1
            ).joined()
        }
        #expect(try plan("team7 && !muted", "AND l.tags <> '{}'").contains("ledger_tags"))
        #expect(try !plan("!muted", "").contains("ledger_tags"))
        #expect(
            try owner.scalar(
                """
                SELECT count(*) FROM tokenkeeper.ledger AS l
                WHERE tokenkeeper.tag_vector(l.tags) @@ tokenkeeper.tag_query('team7 && !muted') AND l.tags <> '{}'
                """) == "67")
        #expect(
            try owner.scalar(
                "SELECT count(*) FROM tokenkeeper.ledger AS l WHERE tokenkeeper.tag_vector(l.tags) @@ tokenkeeper.tag_query('!muted')"
            )
                == "66668", "the token without tags is one of them")
    }

    @Test func `changes of tags count by their instants`() throws {
        var app = try database.connect(user: "a_app")
        var owner = try database.connect()
        func tags(_ token: String) throws -> String? {
            try owner.scalar("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = '\(token)'")
        }
        try app.run("SELECT tokenkeeper.tag('t', token => 'aa', add => '{early}', changed_at => '2024-01-01 00:00Z')")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.sendable_token") == "0", "it was never registered")
        try app.run(
            "SELECT tokenkeeper.register('aa', 't', registered_at => '2023-12-31 00:00Z', device_id => 'd', tags => '{news,old}', user_id => 'u')"
        )
        #expect(try tags("aa") == "news,old,early")
        try app.run("SELECT tokenkeeper.tag('t', user_id => 'u', remove => '{old}', changed_at => '2024-01-02 00:00Z')")
        try app.run(
            "SELECT tokenkeeper.tag('t', device_id => 'd', add => '{sport}', changed_at => '2024-01-03 00:00Z')")
        try app.run("SELECT tokenkeeper.register('bb', 't', registered_at => '2024-01-04 00:00Z', device_id => 'd')")
        #expect(try tags("bb") == "news,early,sport", "the next token of the device has them too")
        #expect(try tags("aa") == "news,early")
        // The former token is deleted, and its device keeps its changes.
        try owner.run("DELETE FROM tokenkeeper.ledger AS l WHERE l.token_key = decode('aa', 'hex')")
        try app.run(
            "SELECT tokenkeeper.register('bb', 't', registered_at => '2024-01-02 12:00Z', tags => '{news,old}')")
        #expect(try tags("bb") == "news,old,sport")
        try app.run("SELECT tokenkeeper.register('bb', 't', tags => '{x}')")
        #expect(try tags("bb") == "x", "a later registration with tags ends them")
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', user_id => 'nobody', add => '{x}')") == "0")
        try app.run("SELECT tokenkeeper.forget('bb')")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.device") == "0")
    }

    @Test func `what came from a forgotten token does not stay with its device`() throws {
        var app = try database.connect(user: "a_app")
        func registered(_ token: String, _ day: Int, _ more: String) throws {
            try app.run(
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => '2025-01-0\(day) 00:00Z', device_id => 'd', \(more))"
            )
        }
        func change(_ who: String, _ more: String) throws {
            try app.run("SELECT tokenkeeper.tag('t', \(who), changed_at => '2025-01-08 00:00Z', \(more))")
        }
        try registered("aa", 1, "user_id => 'bob', tags => '{bobs}'")
        try registered("bb", 2, "user_id => 'ann', tags => '{anns,username:ann}'")
        try registered("cc", 3, "user_id => 'bob'")
        try change("token => 'aa'", "add => '{of-aa}'")
        try change("token => 'bb'", "add => '{of-ann}', remove => '{anns}'")
        try change("token => 'cc'", "add => '{of-cc}'")
        try change("device_id => 'd'", "add => '{of-d}', remove => '{of-aa}'")
        func tags() throws -> String {
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = 'cc'")
        }
        #expect(try tags() == "username:ann,of-ann,of-cc,of-d")
        try app.run("SELECT tokenkeeper.forget_user('ann')")
        #expect(try tags() == "bobs,of-cc,of-d")
        for table in ["ledger", "device", "token_event_log"] {
            #expect(
                try database.psql("SELECT count(*) FROM tokenkeeper.\(table) AS r WHERE to_jsonb(r)::text ~ 'ann'")
                    == "0",
                "\(table)")
        }
        // As if the forgotten token had never been.
        try registered("ee", 9, "tags => NULL")
        #expect(
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = 'ee'")
                == "bobs,of-cc,of-d")
        try app.run("SELECT tokenkeeper.forget('aa')")
        #expect(
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = 'ee'")
                == "of-cc,of-d")
    }

    @Test func `a change of tags is an event of each token whose tags differ then`() throws {
        var app = try database.connect(user: "a_app")
        for (token, more) in [("aa", "device_id => 'd'"), ("bb", "device_id => 'd'"), ("cc", "tags => '{old}'")] {
            try app.run(
                "SELECT tokenkeeper.register('\(token)', 't', user_id => 'u', \(more), registered_at => '2025-01-01 00:00Z'::timestamptz + interval '\(token == "bb" ? 1 : 0) s')"
            )
        }
        func events() throws -> [String] {
            let lines = try database.psql(
                "SELECT token, cause, reason, device_id, user_id FROM tokenkeeper.token_event WHERE event = 'tagged' ORDER BY event_id"
            )
            try database.psql("DELETE FROM tokenkeeper.token_event_log WHERE event = 'tagged'")
            return lines.split(separator: "\n").map(String.init)
        }
        try app.run("SELECT tokenkeeper.tag('t', device_id => 'd', add => '{b,a}')")
        #expect(try events() == ["bb|tag|added a, b|d|u"], "the current token of the device")
        try app.run("SELECT tokenkeeper.tag('t', token => 'aa', add => '{c}')")
        #expect(try events() == ["aa|tag|added c|d|u", "bb|tag|through another token of its device|d|u"])
        try app.run("SELECT tokenkeeper.tag('t', user_id => 'u', add => '{new}', remove => '{old,c}')")
        #expect(
            try events().sorted() == [
                "aa|tag|added new; removed c|d|u", "bb|tag|through another token of its device|d|u",
                "cc|tag|added new; removed old||u",
            ])
        try app.run("SELECT tokenkeeper.tag('t', user_id => 'u', add => '{new}', remove => '{old}')")
        try app.run("SELECT tokenkeeper.tag('t', token => 'cc', remove => '{new}', changed_at => '2025-02-01Z')")
        #expect(try events() == [], "nothing differs")
        try app.run(
            "SELECT tokenkeeper.tag('t', token => 'dd', add => ARRAY(SELECT repeat('x', 100) || n FROM generate_series(1, 9) AS n))"
        )
        let long = try events()
        #expect(long.count == 1 && long[0].contains("...|") && long[0].count < 520)
    }

    @Test(arguments: [
        ("token => 'aa', device_id => 'd', add => '{x}'", "2 of token, device_id and user_id are given, expected one"),
        ("add => '{x}'", "0 of token, device_id and user_id are given, expected one"),
        ("token => 'zz', add => '{x}'", "device token is 'zz'... (2 characters), expected 1 to 512 bytes in hex"),
        ("device_id => '', add => '{x}'", "device_id is 0 bytes long, expected 1 to 512"),
        ("token => 'aa', add => '{x}', changed_at => 'infinity'", "changed_at is infinity, expected a finite instant"),
        ("token => 'aa', add => '{{x}}'", "add or remove is an array of 2 dimensions, expected one"),
        ("token => 'aa', remove => '{x,NULL}'", "a tag is null, expected 1 to 512 bytes"),
        ("token => 'aa', add => '{\"\"}'", "a tag is 0 bytes long, expected 1 to 512 bytes"),
        ("token => 'aa', add => ARRAY[repeat('x', 513)]", "a tag is 513 bytes long, expected 1 to 512 bytes"),
        (
            "token => 'aa', add => array_fill('x'::text, ARRAY[1001])",
            "add or remove has 1001 elements, expected at most 1000"
        ),
        (
            "token => 'aa', add => ARRAY(SELECT 'n' || n FROM generate_series(1, 1000) AS n)",
            "the token would have 1001 tags, expected at most 1000"
        ),
    ])
    func `a wrong change of tags is refused`(arguments: String, error: String) throws {
        var app = try database.connect(user: "a_app")
        try app.run("SELECT tokenkeeper.register('aa', 't', tags => '{a}', registered_at => now() - interval '1 day')")
        let found = #expect(throws: DatabaseError.self) { try app.run("SELECT tokenkeeper.tag('t', \(arguments))") }
        #expect(found?.sqlState == "22023" && found?.message.contains(error) == true, "\(found?.message ?? "")")
    }
}
