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

    @Test func `a change of tags counts from its call, and stays with the device`() throws {
        var app = try database.connect(user: "a_app")
        func tags(_ token: String) throws -> String {
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = '\(token)'")
        }
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', token => 'aa', add => '{early}')") == "0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0", "nothing is remembered")
        try app.run(
            "SELECT tokenkeeper.register('aa', 't', registered_at => '2024-01-01Z', device_id => 'd', tags => '{news,old}', user_id => 'u')"
        )
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', user_id => 'u', remove => '{old}')") == "1")
        #expect(
            try app.scalar("SELECT tokenkeeper.tag('t', device_id => 'd', add => '{sport,both}', remove => '{both}')")
                == "1")
        #expect(try tags("aa") == "news,sport")
        try app.run("SELECT tokenkeeper.register('bb', 't', registered_at => '2024-01-04Z', device_id => 'd')")
        #expect(try tags("bb") == "news,sport", "the next token of the device has them too")
        try app.run("SELECT tokenkeeper.register('bb', 't', registered_at => '2024-01-05Z', tags => '{late}')")
        #expect(try tags("bb") == "news,sport", "a registration that is older than the changes")
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', token => 'aa', add => '{more}')") == "1")
        #expect(try tags("bb") == "news,sport,more", "a change of a former token")
        #expect(
            try app.scalar("SELECT tokenkeeper.tag('t', user_id => 'u', add => '{x}')") == "0",
            "the user has no current token")
        try app.run("SELECT tokenkeeper.register('bb', 't', tags => '{x}')")
        #expect(try tags("bb") == "x", "a later registration with tags")
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', user_id => 'nobody', add => '{x}')") == "0")
        #expect(try app.scalar("SELECT tokenkeeper.tag('unknown', token => 'bb', add => '{x}')") == "0")
    }

    /// In order, as one app would call: what a set of tags says.
    @Test func `the tags of a device are those of the latest calls`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var app = try database.connect(user: "a_app")
        for device in 0..<20 {
            var wanted: Set<String> = []
            var tokens: [String] = []
            for step in 0..<30 {
                func some() -> [String] { ["a", "b", "c", "d"].filter { _ in Bool.random(using: &chance) } }
                if tokens.isEmpty || Int.random(in: 0..<4, using: &chance) == 0 {
                    tokens.append(String(0x10000 + device * 0x100 + step, radix: 16) + "0")
                }
                switch Int.random(in: 0..<4, using: &chance) {
                case 0:
                    try app.run("SELECT tokenkeeper.register('\(tokens.last!)', 't', device_id => 'd\(device)')")
                case 1:
                    let tags = some()
                    try app.run(
                        "SELECT tokenkeeper.register('\(tokens.last!)', 't', device_id => 'd\(device)', tags => '{\(tags.joined(separator: ","))}')"
                    )
                    wanted = Set(tags)
                default:
                    let (add, remove) = (some(), some())
                    let who =
                        Bool.random(using: &chance)
                        ? "device_id => 'd\(device)'" : "token => '\(tokens.randomElement(using: &chance)!)'"
                    let count = try app.scalar(
                        "SELECT tokenkeeper.tag('t', \(who), add => '{\(add.joined(separator: ","))}', remove => '{\(remove.joined(separator: ","))}')"
                    )
                    // A former token may have other tags than the current one; what it has then is the device's.
                    if count != "0" {
                        wanted = Set(
                            try database.psql(
                                "SELECT array_to_string(tags, ',') FROM tokenkeeper.ledger WHERE device_id = 'd\(device)' ORDER BY tags_at DESC NULLS LAST LIMIT 1"
                            ).split(separator: ",").map(String.init))
                        if who.hasPrefix("device_id") {
                            #expect(
                                wanted.isSuperset(of: Set(add).subtracting(remove)) && wanted.isDisjoint(with: remove),
                                "seed \(seed)")
                        }
                    }
                }
                let told = try database.psql(
                    "SELECT array_to_string(tags, ',') FROM tokenkeeper.sendable_token WHERE device_id = 'd\(device)'")
                #expect(
                    Set(told.split(separator: ",").map(String.init)) == wanted,
                    "seed \(seed), device \(device), step \(step)")
            }
        }
    }

    @Test func `what came from a forgotten token does not stay with its device`() throws {
        var app = try database.connect(user: "a_app")
        func registered(_ token: String, _ day: Int, _ more: String) throws {
            try app.run(
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => '2025-01-0\(day) 00:00Z', device_id => 'd', \(more))"
            )
        }
        try registered("aa", 1, "user_id => 'bob', tags => '{bobs}'")
        try registered("bb", 2, "user_id => 'ann', tags => '{anns,username:ann}'")
        try registered("cc", 3, "user_id => 'bob'")
        func tags() throws -> String {
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = 'cc'")
        }
        #expect(try tags() == "anns,username:ann")
        try app.run("SELECT tokenkeeper.forget_user('ann')")
        #expect(try tags() == "")
        for table in ["ledger", "token_event_log"] {
            #expect(
                try database.psql("SELECT count(*) FROM tokenkeeper.\(table) AS r WHERE to_jsonb(r)::text ~ 'ann'")
                    == "0",
                "\(table)")
        }
        // As if the forgotten token had never been.
        try registered("ee", 9, "tags => NULL")
        #expect(
            try database.psql("SELECT array_to_string(tags, ',') FROM tokenkeeper.token WHERE token = 'ee'") == "bobs")
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
            try events().sorted() == ["bb|tag|added new; removed c|d|u", "cc|tag|added new; removed old||u"])
        try app.run("SELECT tokenkeeper.tag('t', user_id => 'u', add => '{new}', remove => '{old}')")
        #expect(try events() == [], "nothing differs")
        try app.run(
            "SELECT tokenkeeper.tag('t', token => 'cc', add => ARRAY(SELECT repeat('x', 100) || n FROM generate_series(1, 9) AS n))"
        )
        let long = try events()
        #expect(long.count == 1 && long[0].contains("...|") && long[0].count < 520)
    }

    @Test(arguments: [
        ("token => 'aa', device_id => 'd', add => '{x}'", "2 of token, device_id and user_id are given, expected one"),
        ("add => '{x}'", "0 of token, device_id and user_id are given, expected one"),
        ("token => 'zz', add => '{x}'", "token is 'zz' (2 characters), expected 1 to 512 bytes in hex"),
        ("device_id => '', add => '{x}'", "device_id is 0 bytes long, expected 1 to 512"),
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
