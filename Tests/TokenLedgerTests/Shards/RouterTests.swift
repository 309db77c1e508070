import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `A router` {
    private static let topic = "com.example.app"

    /// Tokens that are spread over the four shards.
    private static let tokens = (0..<24).map { String(format: "%064x", $0 + 1) }

    @Test func `runs the functions of one token where the token is`() throws {
        let stage = try TestShards()
        let router = stage.routers[0]
        for token in Self.tokens {
            let registered = try router.psql(
                "SELECT tokenkeeper.register('\(token)', '\(Self.topic)', device_id => 'device-\(token)', tags => '{World}', user_id => 'u')",
                user: "a_app")
            #expect(registered == "t")
        }
        var counts: [Int] = []
        for (number, shard) in stage.shards.enumerated() {
            let here = try shard.psql(
                "SELECT count(*), count(*) FILTER (WHERE tokenkeeper.shard_of(token, 4) = \(number) AND tags = '{World}' AND user_id = 'u') FROM tokenkeeper.token"
            ).split(separator: "|")
            #expect(here[0] == here[1], "each is on its shard, with all that was said")
            counts.append(Int(here[0]) ?? 0)
        }
        #expect(counts.reduce(0, +) == Self.tokens.count && !counts.contains(0), "\(counts)")

        // A response in each of the forms that report takes, in upper case.
        let status = ["'410'", "410"]
        let timestamps = ["'%d'", "%d", "to_timestamp(%d / 1000.0)"]
        let now = Int(Date.now.timeIntervalSince1970 * 1000) + 1000
        let forms = status.flatMap { status in
            timestamps.map { "\(status), 'Unregistered', " + $0.replacing("%d", with: "\(now)") }
        }
        for (token, form) in zip(Self.tokens, forms) {
            try router.psql(
                "SELECT tokenkeeper.report('\(Self.topic)', '\(token.uppercased())', \(form), sent_at => now())",
                user: "a_sender")
        }
        try router.psql(
            "SELECT tokenkeeper.unregister('\(Self.tokens[6])', '\(Self.topic)', at => clock_timestamp())",
            user: "a_app")
        for shard in stage.shards {
            var daemon = try shard.connect(user: "a_daemon")
            try drainAll(&daemon)
        }
        for (index, token) in Self.tokens.enumerated() {
            let answer = try router.psql(
                "SELECT tokenkeeper.is_sendable('\(token)', '\(Self.topic)')", user: "a_sender")
            #expect(answer == (index <= 6 ? "f" : "t"), "token \(index)")
        }
        #expect(
            try router.psql(
                "SELECT tokenkeeper.is_sendable('zz', 't'), tokenkeeper.is_sendable(NULL, 't')", user: "a_sender")
                == "f|f")

        // The other router leads to the same ledger. Order, spelling and duplicates are kept.
        let asked = (Self.tokens.reversed() + [Self.tokens[9], Self.tokens[8].uppercased(), "zz", Self.tokens[0]])
        let expected = asked.filter { token in !Self.tokens.prefix(7).contains(token) && token != "zz" }
        let list = asked.map { "'\($0)'" }.joined(separator: ", ")
        for other in stage.routers {
            let sendable = try other.psql(
                "SELECT * FROM tokenkeeper.sendable(ARRAY[\(list), NULL], '\(Self.topic)')", user: "a_sender")
            #expect(sendable.split(separator: "\n").map(String.init) == expected)
        }
        for nothing in ["NULL", "'{}'", "'{NULL,zz}'"] {
            #expect(
                try router.psql("SELECT count(*) FROM tokenkeeper.sendable(\(nothing), 't')", user: "a_sender") == "0")
        }
    }

    @Test func `takes many registrations at once, and says which were refused`() throws {
        let stage = try TestShards()
        let router = stage.routers[0]
        let good = Self.tokens.map { #"{"token": "<\#($0)>", "device_id": "d\#($0)"}"# }
        let bad = [#"{"token": "zz"}"#, "5", #"{"token": "c4", "topic": " "}"#, #"{"token": "c5", "tags": 1}"#]
        var entries = good
        for (number, entry) in bad.enumerated() { entries.insert(entry, at: 5 * number + 2) }
        entries.append(#"{"token": "\#(Self.tokens[0])", "unregistered": true}"#)
        let call = "SELECT * FROM tokenkeeper.register_many('[\(entries.joined(separator: ","))]', '\(Self.topic)')"
        let direct = try TestCluster.shared.database()
        let refused = try router.psql(call, user: "a_app")
        #expect(refused.split(separator: "\n").count == bad.count)
        #expect(try refused == direct.psql(call, user: "a_app"), "as one database says it")
        let tokens = "SELECT token || ' ' || state || ' ' || device_id FROM tokenkeeper.token"
        let union = try stage.shards.flatMap { try $0.psql(tokens).split(separator: "\n") }.sorted()
        #expect(try union == direct.psql(tokens).split(separator: "\n").sorted())
        #expect(union.count == Self.tokens.count)
        #expect(try router.psql("SELECT * FROM tokenkeeper.register_many('[]')", user: "a_app") == "")
        let base64 = Data([0xAA, 0xBB, 0xCC, 0xDD]).base64EncodedString()
        #expect(
            try router.psql(
                #"SELECT * FROM tokenkeeper.register_many('[{"token":"\#(base64)"}]', 't', base64 => true)"#,
                user: "a_app") == "")
        #expect(
            try stage.shard(of: "aabbccdd").psql("SELECT count(*) FROM tokenkeeper.token WHERE token = 'aabbccdd'")
                == "1")
        for wrong in ["'{}'", "NULL", "(SELECT jsonb_agg(i) FROM generate_series(1, 1001) AS i)"] {
            let failure = try #require(throws: TestFailure.self) {
                try router.psql("SELECT * FROM tokenkeeper.register_many(\(wrong))", user: "a_app")
            }
            #expect(failure.description.contains("expected an array of at most 1000 objects"))
        }
    }

    @Test func `tags one token, or those of a user or a device wherever they are`() throws {
        let stage = try TestShards()
        let router = stage.routers[0]
        for (number, token) in Self.tokens.enumerated() {
            try router.psql(
                "SELECT tokenkeeper.register('\(token)', 't', device_id => 'd\(number)', user_id => '\(number < 10 ? "one" : "two")')",
                user: "a_app")
        }
        func tag(_ whom: String, _ tag: String) throws -> String {
            try router.psql("SELECT tokenkeeper.tag('t', \(whom), add => '{\(tag)}')", user: "a_app")
        }
        func tagged(_ tag: String) throws -> Int {
            try stage.shards.map {
                Int(try $0.psql("SELECT count(*) FROM tokenkeeper.token WHERE '\(tag)' = ANY (tags)")) ?? 0
            }.reduce(0, +)
        }
        #expect(try tag("token => '\(Self.tokens[0])'", "a") == "1")
        #expect(try tag("user_id => 'one'", "b") == "10")
        #expect(try tag("device_id => 'd20'", "c") == "1")
        #expect(try [tagged("a"), tagged("b"), tagged("c")] == [1, 10, 1])
        for wrong in [
            "token => 'aa', user_id => 'one'", "user_id => 'one', device_id => 'd1'", "token => 'zz'", "token => NULL",
        ] {
            #expect(throws: TestFailure.self) { try tag(wrong, "x") }
        }
        #expect(try tagged("x") == 0)
    }

    @Test func `asks the shard for the time, so that a router's clock decides nothing`() throws {
        let stage = try TestShards()
        let defaults = try stage.routers[0].psql(
            """
            SELECT count(*) FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND pg_get_function_arguments(p.oid) LIKE '%clock_timestamp%'
            """, user: "postgres")
        #expect(defaults == "0")
        // The instants of the shard alone order a logout and the login after it.
        for router in stage.routers {
            try router.psql("SELECT tokenkeeper.unregister('\(Self.tokens[0])', 't')", user: "a_app")
            #expect(try router.psql("SELECT tokenkeeper.register('\(Self.tokens[0])', 't')", user: "a_app") == "t")
        }
    }

    @Test func `lets the shards decide what a login may do`() throws {
        let stage = try TestShards()
        let router = stage.routers[0]
        #expect(throws: TestFailure.self) {
            try router.psql("SELECT tokenkeeper.register('aa', 't')", user: "a_sender")
        }
        // On the router it may, and on this shard it may not.
        let shard = try stage.shard(of: Self.tokens[0])
        let rights = "EXECUTE ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz)"
        try shard.psql("REVOKE \(rights) FROM tokenkeeper_app")
        let failure = try #require(throws: TestFailure.self) {
            try router.psql("SELECT tokenkeeper.unregister('\(Self.tokens[0])', 't')", user: "a_app")
        }
        #expect(failure.description.contains("REMOTE ERROR: permission denied"), "\(failure)")
        let open = try router.psql(
            """
            SELECT p.oid::regprocedure FROM pg_proc AS p
            WHERE p.pronamespace IN ('tokenkeeper'::regnamespace, 'tokenkeeper_shard'::regnamespace)
              AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee = 0))
              AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.objid = p.oid AND d.deptype = 'e')
            """, user: "postgres")
        #expect(open == "", "nothing is granted to PUBLIC")
    }

    @Test func `lets nobody come to the shards under another name`() throws {
        let router = try TestShards().routers[0]
        let logins = ["a_sender", "a_app", "a_reader", "a_operator", "a_daemon"]
        for login in logins {
            // With USAGE on a server, a login may make or change its own mapping. With the language, it may write a function for any cluster.
            let rights = try router.psql(
                """
                SELECT 'server ' || s.srvname FROM pg_foreign_server AS s WHERE has_server_privilege('\(login)', s.oid, 'USAGE')
                UNION ALL
                SELECT 'wrapper ' || w.fdwname FROM pg_foreign_data_wrapper AS w WHERE has_foreign_data_wrapper_privilege('\(login)', w.oid, 'USAGE')
                UNION ALL
                SELECT 'schema ' || n.nspname FROM pg_namespace AS n WHERE n.nspname ~ '^(tokenkeeper|plproxy)' AND has_schema_privilege('\(login)', n.oid, 'CREATE')
                UNION ALL
                SELECT 'language ' || l.lanname FROM pg_language AS l WHERE l.lanname = 'plproxy' AND l.lanpltrusted
                """, user: "postgres")
            #expect(rights == "", "\(login)")
            for attempt in [
                "CREATE USER MAPPING FOR CURRENT_USER SERVER tokenkeeper_shard_0 OPTIONS (user 'postgres')",
                "ALTER USER MAPPING FOR CURRENT_USER SERVER tokenkeeper_shard_0 OPTIONS (SET user 'postgres')",
                "CREATE FUNCTION pg_temp.f() RETURNS text LANGUAGE plproxy AS $$ CONNECT 'dbname=x user=postgres'; SELECT 'x'; $$",
                "CREATE OR REPLACE FUNCTION plproxy.get_cluster_config(cluster_name text, OUT key text, OUT val text) RETURNS SETOF record "
                    + "LANGUAGE sql AS 'VALUES (''default_user'', ''postgres'')'",
            ] {
                let failure = try #require(throws: TestFailure.self) { try router.psql(attempt, user: login) }
                // The daemon's login has no mapping.
                let refusals = ["permission denied", "must be owner", "user mapping for \"\(login)\" does not exist"]
                #expect(refusals.contains { failure.description.contains($0) }, "\(failure)")
            }
        }
        // Each mapping names its own login, and there is none for everybody.
        let others = try router.psql(
            "SELECT u.usename || ' ' || u.umoptions::text FROM pg_user_mappings AS u WHERE u.umuser = 0 OR NOT 'user=' || u.usename = ANY (u.umoptions)",
            user: "postgres")
        #expect(others == "")
    }

    @Test func `names the shard that is down, and serves the others`() throws {
        let last = try TestCluster.prepared()
        let stage = try TestShards(last: last)
        let lost = try Self.tokens.filter { try stage.shard(of: $0).name == stage.shards[3].name }
        let others = Self.tokens.filter { !lost.contains($0) }
        let router = stage.routers[0]
        for token in Self.tokens { try router.psql("SELECT tokenkeeper.register('\(token)', 't')", user: "a_app") }
        // The session has a connection to each shard when the last one goes.
        last.stop(mode: "fast")
        for router in stage.routers {
            // libpq's error has two lines, the second with a tab.
            let warnings = try router.psql("SELECT critical_warnings[1] FROM tokenkeeper.status", user: "a_reader")
            #expect(warnings.contains(" Is the server running"), "\(warnings)")
            let failure = try #require(throws: TestFailure.self) {
                try router.psql("SELECT tokenkeeper.resume_sending('t')", user: "a_operator")
            }
            #expect(failure.description.contains(" Is the server running"), "\(failure)")
            for token in others.prefix(8) {
                #expect(try router.psql("SELECT tokenkeeper.register('\(token)', 't')", user: "a_app") == "t")
                #expect(try router.psql("SELECT tokenkeeper.is_sendable('\(token)', 't')", user: "a_sender") == "t")
            }
            let list = others.map { "'\($0)'" }.joined(separator: ", ")
            let call = "SELECT count(*) FROM tokenkeeper.sendable(ARRAY[\(list)], 't')"
            #expect(try router.psql(call, user: "a_sender") == "\(others.count)")
            let calls = [
                ("SELECT tokenkeeper.register('\(lost[0])', 't')", "a_app"),
                ("SELECT tokenkeeper.is_sendable('\(lost[0])', 't')", "a_sender"),
                ("SELECT tokenkeeper.sendable(ARRAY[\(list), '\(lost[0])'], 't')", "a_sender"),
                (#"SELECT tokenkeeper.register_many('[{"token":"\#(lost[0])"}]', 't')"#, "a_app"),
                ("SELECT tokenkeeper.tag('t', user_id => 'u', add => '{x}')", "a_app"),
            ]
            for (call, user) in calls {
                // The first may meet the end of a connection, and the next ones a server that is not there.
                _ = try? router.psql(call, user: user)
                let failure = try #require(throws: TestFailure.self, "\(call)") { try router.psql(call, user: user) }
                #expect(
                    failure.description.contains("[\(stage.shards[3].name)]")
                        && failure.description.contains(last.folder),
                    "\(failure)")
            }
        }
        let asked = others + [lost[0], "zz"] + others.prefix(1) + [lost[1].uppercased()]
        let call = "SELECT * FROM tokenkeeper.sendable(ARRAY[\(asked.map { "'\($0)'" }.joined(separator: ", "))], 't'"
        func run(_ more: String) throws -> ProgramRun {
            try ProgramRun(["psql", "-XAtq", "-d", router.url(user: "a_sender"), "-c", "\(call)\(more))"])
        }
        let withheld = try run(", unanswered => 'withhold'")
        #expect(
            withheld.output.split(separator: "\n").map(String.init) == others + others.prefix(1), "\(withheld)")
        let warning =
            "WARNING:  shard 3 (database \(stage.shards[3].name)) does not answer: 2 of \(asked.count) tokens are withheld"
        #expect(
            withheld.errors.contains(warning) && withheld.errors.components(separatedBy: "withheld").count == 2,
            "\(withheld)")
        #expect(withheld.errors.contains("DETAIL:  PL/Proxy function") && withheld.errors.contains(last.folder))
        #expect(try run(", unanswered => 'error'").errors.contains("ERROR:  PL/Proxy function"))
        for wrong in ["'pass'", "NULL"] {
            #expect(try run(", unanswered => \(wrong)").errors.contains("expected error or withhold"))
        }
        let findings = try stage.check(stage.routers[0])
        #expect(findings.count == 1 && findings[0].hasPrefix("shard 3: "), "\(findings)")
        try last.start()
        let complete = try run(", unanswered => 'withhold'")
        #expect(complete.errors == "" && complete.output.split(separator: "\n").count == asked.count - 1, "\(complete)")
        for router in stage.routers {
            try eventually("the shard answers again") {
                (try? router.psql("SELECT tokenkeeper.is_sendable('\(lost[0])', 't')", user: "a_sender")) == "t"
            }
        }
        #expect(try stage.check(stage.routers[0]) == [])
    }

    @Test func `compares the logins, the numbers and what was run`() throws {
        let last = try TestCluster.prepared()
        let stage = try TestShards(last: last)
        // Its logins are those of this cluster, to which no other test adds any.
        let router = try last.database(migrated: false)
        #expect(try stage.check(router) == ["router: this database is none yet: run `tokenkeeperd router migrate`"])
        #expect(try stage.migrate(router))
        #expect(try stage.check(router) == [])
        #expect(try !stage.migrate(router), "there is nothing to do")

        try router.psql("CREATE ROLE newcomer LOGIN IN ROLE tokenkeeper_app", user: "postgres")
        let stale =
            "router: it was made from another map or by another release, or logins or the schemas of the shards have changed: run `tokenkeeperd router migrate`"
        func lacks(_ shard: Int) -> String {
            "shard \(shard): newcomer is no login with the role tokenkeeper_app, as it is on the router"
        }
        #expect(try stage.check(router) == [lacks(0), lacks(1), lacks(2), stale])
        #expect(try stage.migrate(router))
        #expect(try stage.check(router) == [lacks(0), lacks(1), lacks(2)])

        try stage.shards[1].psql("COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS 'x'")
        #expect(try !stage.migrate(router), "only shard 0 is copied")
        try stage.shards[0].psql("COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS 'x'")
        #expect(try stage.check(router).last == stale)
        #expect(try stage.migrate(router))
        #expect(
            try router.psql(
                "SELECT obj_description('tokenkeeper.is_sendable(text, text, text)'::regprocedure)", user: "postgres")
                == "x")

        try stage.shards[2].psql("DELETE FROM tokenkeeper.shard")
        #expect(
            try stage.check(router).contains("shard 2: it does not know its number: run `tokenkeeperd router migrate`"))
        try stage.shards[2].psql("INSERT INTO tokenkeeper.shard VALUES (2, 8)")
        let error = ShardError.otherNumber(shard: 2, of: 4, isShard: 2, ofShards: 8)
        #expect(try stage.check(router).contains(error.description))
        #expect(throws: error) { try stage.migrate(router) }
        try stage.shards[2].psql("UPDATE tokenkeeper.shard SET shards = 4")
        try stage.shards[0].psql("DELETE FROM tokenkeeper.repeatable")
        let finding = try #require(try stage.check(router).first)
        #expect(finding.hasPrefix("shard 0: ") && finding.contains("run `tokenkeeperd migrate`"), "\(finding)")
    }

    @Test func `is made of shards without foreign tokens, by a superuser, in a database without a ledger`() throws {
        let stage = try TestShards(migrated: false)
        let router = stage.routers[0]
        #expect(throws: ShardError.notSuperuser(role: "owner")) {
            var connection = try router.connect(user: "owner")
            _ = try stage.router().migrate(&connection)
        }
        let foreign = try #require(Self.tokens.first { try stage.shard(of: $0).name != stage.shards[3].name })
        let own = try #require(Self.tokens.first { try stage.shard(of: $0).name == stage.shards[3].name })
        for token in [foreign, own] {
            try stage.shards[3].psql("SELECT tokenkeeper.register('\(token)', 't')", user: "a_app")
        }
        #expect(throws: ShardError.hasOtherTokens(shard: 3, of: 4)) { try stage.migrate(router) }
        #expect(try router.psql("SELECT to_regnamespace('tokenkeeper') IS NULL", user: "postgres") == "t")
        try stage.shards[3].psql("SELECT tokenkeeper.forget('\(foreign)')", user: "a_app")
        #expect(try stage.migrate(router), "its own tokens may stay")
        let ledger = stage.shards[0]
        let failure = try #require(throws: DatabaseError.self) { try stage.migrate(ledger) }
        #expect(failure.message.contains("has a ledger of its own"))
        // Half of the shards cannot become all of them.
        var connection = try router.connect(user: "postgres")
        let half = Router(
            to: try ShardMap(stage.shards.prefix(2).map(TestShards.connection)), shardUser: "owner",
            daemon: Version(major: 0, minor: 1, patch: 0))
        #expect(throws: ShardError.otherNumber(shard: 0, of: 2, isShard: 0, ofShards: 4)) {
            _ = try half.migrate(&connection)
        }
    }

    @Test(arguments: [
        (["dbname=a", "dbname=b", "dbname=c"], "it has 3 shards, expected a power of two from 1 to 1024"),
        ([], "it has 0 shards, expected a power of two from 1 to 1024"),
        (["dbname=a", "dbname=b password=secret"], "shard 1: a password in the map can be read"),
        (["postgresql://u:secret@h/a"], "shard 0: a password in the map can be read"),
        (["dbname=a user=u"], "shard 0: a user in the map, expected none"),
        (["host=a"], "shard 0: no database, expected dbname=…"),
        (["host=a dbname=x", "dbname='x' host=a"], "shard 1 is the same database as shard 0"),
        (["secret"], "shard 0: not a connection string that libpq understands"),
    ])
    func `a map has a power of two of databases, without users and passwords`(connections: [String], problem: String)
        throws
    {
        let error = try #require(throws: ShardError.self) { _ = try ShardMap(connections) }
        #expect(error.description.hasPrefix("the shard map: \(problem)"), "\(error)")
        #expect(!error.description.contains("secret"))
    }

    @Test func `a map passes every value to PL/Proxy as it is`() throws {
        let map = try ShardMap([#"dbname='it\'s \\ a' host=b connect_timeout=3"#])
        #expect(
            map.connection(of: 0)
                == #"connect_timeout='3' dbname='it\'s \\ a' host='b' keepalives_count='3' keepalives_idle='30' keepalives_interval='10'"#
        )
        #expect(try DatabaseAddress(map.connection(of: 0)).options["dbname"] == #"it's \ a"#)
    }
}
