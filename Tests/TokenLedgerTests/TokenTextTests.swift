import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `Tokens as people store them` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// What `parse_token` makes of a text: the hex, or `-`. The text is an SQL expression.
    private func parsed(_ text: String, base64: Bool = false) throws -> String {
        try database.psql("SELECT coalesce(tokenkeeper.parse_token(\(text), \(base64)), '-')", user: "a_app")
    }

    private func fault(_ text: String, base64: Bool = false) throws -> String {
        try database.psql("SELECT coalesce(tokenkeeper.token_fault(\(text), \(base64)), '-')", user: "a_app")
    }

    @Test(arguments: TokenSpellings.all)
    func `the database and the daemon read each spelling as one token`(text: String) throws {
        var app = try database.connect(user: "a_app")
        let key = try app.query("SELECT encode(tokenkeeper.token_key($1), 'hex')", [.text(text)]).values(String.self)
        #expect(key == [TokenSpellings.token])
        #expect(try app.query("SELECT tokenkeeper.parse_token($1)", [.text(text)]).values(String.self) == key)
        #expect(DeviceToken(spelled: text)?.hex == TokenSpellings.token)
    }

    @Test(arguments: [
        ("NULL", "token is null"), ("''", "token is empty"), ("'  '", "token is '  ' (2 characters)"),
        ("'abc'", "token is 'abc' (3 characters): an odd number of hex digits"),
        ("'abcdefghijk'", "token is 'abcdefgh'... (11 characters)"),
        ("'ab:cd-ef'", "token is 'ab:cd-ef' (8 characters)"),
        ("'<>'", "token is '<>' (2 characters)"), ("'0x'", "token is '0x' (2 characters)"),
        ("'\"abcd\"'", "token is '\"abcd\"' (6 characters)"), ("'ab,cd'", "token is 'ab,cd' (5 characters)"),
        ("'a' || chr(10) || chr(27) || 'z'", "token is 'a??z' (4 characters)"),
        ("repeat('ab', 513)", "token is 'abababab'... (1026 characters): more than 512 bytes"),
        ("repeat('ab', 1000000)", "token is 'abababab'... (2000000 characters): more than 512 bytes"),
        ("'550e8400-e29b-41d4-a716-446655440000'", "token is '550e8400'... (36 characters): a UUID"),
        (
            "'{length = 32, bytes = 0x965b251c 6cb1926d 8a6b7a17 9a8b3c62 ... 1c6cb192 de3b0ac1 }'",
            "token is '{length '... (83 characters): a shortened description of NSData (iOS 13 or later), whose bytes are lost"
        ), ("'ExponentPushToken[abc]'", "token is 'Exponent'... (22 characters): a token of Expo"),
        ("'c3Rh:APA91bHPRg'", "token is 'c3Rh:APA'... (15 characters): a token of Firebase Cloud Messaging"),
    ])
    func `what is no token has a fault that shows eight characters at most`(text: String, told: String) throws {
        #expect(try parsed(text) == "-")
        #expect(try fault(text) == told + ", expected 1 to 512 bytes in hex")
    }

    @Test func `512 bytes are a token, in every form`() throws {
        let hex = String(repeating: "ab", count: 512)
        #expect(try parsed("repeat('ab', 512)") == hex)
        #expect(try parsed("'<' || repeat('ab ', 512) || '>'") == hex)
        #expect(try parsed("repeat('AB-', 511) || 'AB'") == hex)
        #expect(try parsed("encode(decode(repeat('ab', 512), 'hex'), 'base64')", base64: true) == hex)
        #expect(try parsed("encode(decode(repeat('ab', 513), 'hex'), 'base64')", base64: true) == "-")
    }

    /// Base64 on request: four hex digits are base64, too.
    @Test func `base64 is read on request only`() throws {
        let hex = String(repeating: "fbefbe01", count: 8)
        let base64 = "encode(decode('\(hex)', 'hex'), 'base64')"
        for text in [
            base64, "translate(\(base64), '+/', '-_')", "rtrim(\(base64), '=')", "' ' || \(base64) || chr(10)",
        ] {
            #expect(try parsed(text, base64: true) == hex)
            #expect(try fault(text, base64: true) == "-")
            #expect(try parsed(text) == "-")
        }
        #expect(try parsed("'q80='", base64: true) == "abcd")
        #expect(try parsed("'abcd'") == "abcd")
        #expect(try parsed("'abcd'", base64: true) == "69b71d", "asked for base64, it is base64")
        // No text of 16 bytes in base64 consists of hex digits by chance.
        for text in [
            "'\(hex)'", "upper('\(hex)')", "'0x\(hex)'", "'<\(hex)>'",
            "regexp_replace('\(hex)', '(..)(?=.)', '\\1-', 'g')",
        ] {
            #expect(try parsed(text, base64: true) == hex, "hex is hex: \(text)")
        }
        let digits = String(hex.prefix(32))
        #expect(try parsed("regexp_replace('\(digits)', '(.{8})', '\\1 ', 'g')", base64: true) == digits)
        #expect(try parsed("left('\(digits)', 31) || ' '", base64: true) != "-", "31 of them are base64")
        for text in ["'q'", "'q80=='", "'q8='", "'q80==='", "'='", "'q*80'", "'550e8400-e29b-41d4-a716-446655440000'"] {
            #expect(try parsed(text, base64: true) == "-")
            #expect(try fault(text, base64: true).hasSuffix(", expected 1 to 512 bytes in hex or base64"))
        }
    }

    /// Also of texts that nobody stores on purpose.
    @Test func `random texts raise nothing, and have either a key or a fault`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let pieces = [
            "ab", "ab", "AB", "cd", "C", "0x", "<", ">", " ", "\t", "\u{FEFF}", "-", ":", "=", "+", "/", "_", "\u{E9}",
            "\u{1F600}",
            "\u{1}", "\u{A0}", "é",
            "'", "\\x",
        ]
        let texts = (0..<2_000).map { _ in
            (0..<Int.random(in: 0...12, using: &chance)).map { _ in pieces.randomElement(using: &chance)! }.joined()
        }
        var app = try database.connect(user: "a_app")
        let list = texts.map { "'" + $0.replacingOccurrences(of: "'", with: "''") + "'" }.joined(separator: ",")
        #expect(
            try app.scalar(
                """
                SELECT count(*) FROM unnest(ARRAY[\(list)]) AS t, unnest('{true,false}'::boolean[]) AS b
                WHERE (tokenkeeper.parse_token(t, b) IS NULL) <> (tokenkeeper.token_fault(t, b) IS NOT NULL)
                   OR tokenkeeper.parse_token(t, b) !~ '^([0-9a-f]{2}){1,255}$'
                """) == "0", "seed \(seed)")
        #expect(
            try app.scalar(
                "SELECT count(*) BETWEEN 50 AND 3950 FROM unnest(ARRAY[\(list)]) AS t, unnest('{true,false}'::boolean[]) AS b WHERE tokenkeeper.parse_token(t, b) IS NOT NULL"
            ) == "t", "seed \(seed): some are tokens")
        let read = try app.lines(
            "SELECT coalesce(tokenkeeper.parse_token(t), '-') FROM unnest(ARRAY[\(list)]) WITH ORDINALITY AS u (t, n) ORDER BY n",
            columns: 1)
        #expect(read == texts.map { DeviceToken(spelled: $0)?.hex ?? "-" }, "seed \(seed): the daemon reads the same")
    }

    @Test func `plain hex is read without a call`() throws {
        // The planner replaces the call by its expression, so an index or a scan of millions of rows does not enter a function for each.
        let plan = try database.psql(
            "EXPLAIN VERBOSE SELECT tokenkeeper.parse_token(t), tokenkeeper.token_key(t) FROM unnest('{aa}'::text[]) AS t"
        )
        #expect(
            plan.contains("parse_decorated_token") && !plan.contains("parse_token(") && !plan.contains("token_key("))
    }

    @Test func `a sound registration is checked without a call`() throws {
        let plan = try database.psql(
            "EXPLAIN VERBOSE SELECT tokenkeeper.is_sound_registration(NULL, d, d, ARRAY[d]) FROM unnest('{aa}'::text[]) AS d"
        )
        #expect(!plan.contains("is_sound_registration("), "\(plan)")
    }
}
