import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Arguments in every collation that a caller's column may have: the functions behave the same, and use the same indexes.
@Suite(.ownThread) struct `The caller's collations` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            """
            CREATE COLLATION ours (provider = icu, locale = 'de-DE');
            CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
            GRANT USAGE ON SCHEMA public TO PUBLIC;
            """, user: "postgres")
    }

    private static let collations = ["\"default\"", "\"C\"", "public.ours", "public.blind"]

    @Test(arguments: collations)
    func `every function accepts any collation`(collation: String) throws {
        var owner = try database.connect()
        func text(_ value: String) -> String { "'\(value)' COLLATE \(collation)" }
        let (topic, production) = (text("com.example.app"), text("production"))
        #expect(
            try owner.scalar(
                "SELECT tokenkeeper.register(\(text("aa")), \(topic), \(production), device_id => \(text("d")), tags => ARRAY[\(text("x"))])"
            ) == "t")
        #expect(
            try owner.scalar(
                "SELECT tokenkeeper.register(\(text("bb")), \(topic), \(production), device_id => \(text("d")))") == "t"
        )
        #expect(
            try owner.lines("SELECT token, state, tags FROM tokenkeeper.token ORDER BY 1", columns: 3)
                == ["aa|superseded|{x}", "bb|active|{x}"])
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable(\(text("AA")), \(topic), \(production))") == "f")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable(\(text("bb")), \(topic))") == "t")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable(\(text("zz")), \(topic))") == "f")
        #expect(
            try owner.lines(
                "SELECT tokenkeeper.sendable(ARRAY['aa', 'bb', 'zz', NULL] COLLATE \(collation), \(topic), \(production))",
                columns: 1) == ["bb"])
        try owner.execute("SELECT tokenkeeper.unregister(\(text("bb")), \(topic), \(production))")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable('bb', 'com.example.app')") == "f")
        #expect(try owner.scalar("SELECT tokenkeeper.token_key(\(text("aA")))") == "\\xaa")
        // Upper and lower case are two devices and two topics, even where the caller's collation calls them equal.
        #expect(try owner.scalar("SELECT tokenkeeper.forget_device(\(text("D")))") == "0")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable(\(text("bb")), \(text("COM.example.app")))") == "t")
        try owner.execute(
            "INSERT INTO tokenkeeper.rejected_result (error, token, queued_at) VALUES ('e', ' aa ', now())")
        #expect((Int(try owner.scalar("SELECT tokenkeeper.forget(\(text("aa")))") ?? "") ?? 0) >= 3)
        #expect((Int(try owner.scalar("SELECT tokenkeeper.forget_device(\(text("d")))") ?? "") ?? 0) >= 2)
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token") == "0")
    }

    @Test func `two arguments of different collations do not conflict`() throws {
        try database.psql(
            """
            CREATE TABLE mine (token text COLLATE ours, topic text COLLATE blind, device text COLLATE "C");
            INSERT INTO mine VALUES ('aa', 't', 'd')
            """)
        #expect(
            try database.psql(
                """
                SELECT tokenkeeper.register(token, topic, device_id => device) FROM mine;
                SELECT tokenkeeper.is_sendable(token, topic) FROM mine;
                SELECT tokenkeeper.sendable(array_agg(token), min(topic COLLATE "C")) FROM mine;
                SELECT tokenkeeper.unregister(token, topic) FROM mine;
                SELECT tokenkeeper.forget_device(device) > 0 FROM mine
                """) == "t\nt\naa\n1\nt")
    }

    @Test(arguments: collations)
    func `a registration reads only the tokens of its device`(collation: String) throws {
        var app = try database.connect()
        try app.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i)) FROM generate_series(1, 3000) AS i"
        )
        try app.execute("BEGIN")
        let before = try app.rowsRead(of: "ledger")
        // A query like those of our own views: the new token of a known device, by text of that collation.
        try app.execute(
            "SELECT tokenkeeper.register('ff' || token, topic, environment, device_id => device_id COLLATE \(collation)) FROM tokenkeeper.token WHERE token_key = '\\x0000000a'"
        )
        let after = try app.rowsRead(of: "ledger")
        try app.execute("COMMIT")
        #expect(after - before < 3000 + 200, "\(after - before) rows; 3000 are the view's")
        #expect(
            try app.scalar("SELECT state FROM tokenkeeper.token WHERE token_key = '\\x0000000a'") == "superseded")
    }
}
