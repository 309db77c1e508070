import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// `tokenkeeperd router migrate` and `tokenkeeperd router check` as an administrator runs them, with two shards on two servers.
@Suite(.ownThread) struct `The commands that make and check a router` {
    /// The first shard and the routers are on one server, the second shard on another.
    private struct Stage {
        let shards: [TestDatabase]
        let routers: [TestDatabase]
        private let folder: TemporaryDirectory
        let map: String

        private static let servers = Result { [try TestCluster.prepared(), try TestCluster.prepared()] }

        /// - Parameter second: The server of the second shard, for a test that changes its roles; nil for one that tests share.
        init(second: TestCluster? = nil) throws {
            let servers = try Self.servers.get()
            shards = [try servers[0].database(), try (second ?? servers[1]).database()]
            routers = try (0..<2).map { _ in try servers[0].database(migrated: false) }
            folder = try TemporaryDirectory()
            map = try folder.write(TestShards.mapText(shards), to: "shards.toml")
        }

        func file(_ text: String, _ name: String = "other.toml") throws -> String { try folder.write(text, to: name) }

        /// - Parameter router: Its number.
        func run(
            _ command: String, _ more: String..., map: String? = nil, on router: Int = 0, as user: String = "postgres",
            shardUser: String = "owner"
        ) throws -> ProgramRun {
            try ProgramRun(
                [DaemonProcess.program, "router", command, "--shards", map ?? self.map, "--shard-user", shardUser]
                    + more,
                environment: ["TOKENKEEPER_DATABASE_URL": routers[router].url(user: user)])
        }

        /// Whether a command had nothing to complain about, and printed just this line.
        func prints(_ line: String, _ run: ProgramRun) -> Bool {
            run.status == 0 && run.output == line + "\n" && run.errors == ""
        }
    }

    private static let agree = "the router and all shards agree"

    @Test func `migrate makes a router that works, and says when there is nothing to do`() throws {
        let stage = try Stage()
        let before = try stage.run("check")
        #expect(before.status == 1 && before.errors == "", "\(before)")
        #expect(
            before.output == """
                shard 0: it does not know its number: run `tokenkeeperd router migrate`
                shard 1: it does not know its number: run `tokenkeeperd router migrate`
                router: this database is none yet: run `tokenkeeperd router migrate`

                """, "\(before)")
        let made = try stage.run("migrate")
        #expect(stage.prints("the router leads to all shards", made), "\(made)")
        #expect(
            try stage.shards.map { try $0.psql("SELECT number, shards FROM tokenkeeper.shard") } == ["0|2", "1|2"])
        let check = try stage.run("check", shardUser: "a_reader")
        #expect(stage.prints(Self.agree, check), "\(check)")
        // Once the shards know their numbers, the rights of a reader are enough.
        let again = try stage.run("migrate", shardUser: "a_reader")
        #expect(stage.prints("the router is up to date", again), "\(again)")

        for number in 0..<20 {
            try stage.routers[0].psql(
                "SELECT tokenkeeper.register('\(String(0x100 + number, radix: 16))0', 't')", user: "a_app")
        }
        let tokens = try stage.shards.map { Int(try $0.psql("SELECT count(*) FROM tokenkeeper.token")) ?? 0 }
        #expect(tokens.allSatisfy { $0 > 0 } && tokens.reduce(0, +) == 20, "\(tokens)")
    }

    @Test func `migrate with --print changes nothing, and psql makes the router from what it prints`() throws {
        let stage = try Stage()
        let printed = try stage.run("migrate", "--print")
        #expect(printed.status == 0 && printed.errors == "", "\(printed.errors)")
        #expect(printed.output.hasPrefix("-- tokenkeeperd ") && printed.output.hasSuffix("COMMIT;\n"))
        for shard in stage.shards { #expect(try shard.psql("SELECT count(*) FROM tokenkeeper.shard") == "0") }
        let isRouter = "SELECT to_regnamespace('tokenkeeper') IS NOT NULL"
        #expect(try stage.routers[0].psql(isRouter, user: "postgres") == "f")

        try TestCluster.run(
            [
                "psql", "-XAtq", "-d", stage.routers[0].url(user: "postgres"), "-f",
                try stage.file(printed.output, "router.sql"),
            ])
        let unnumbered = try stage.run("check")
        #expect(
            unnumbered.status == 1
                && unnumbered.output.split(separator: "\n").map { $0.prefix(40) } == [
                    "shard 0: it does not know its number: ru", "shard 1: it does not know its number: ru",
                ], "\(unnumbered)")
        // As docs/how-to/shard.md says.
        for number in 0..<2 {
            try stage.shards[number].psql("INSERT INTO tokenkeeper.shard (number, shards) VALUES (\(number), 2)")
        }
        let check = try stage.run("check")
        #expect(stage.prints(Self.agree, check), "\(check)")
        let migrated = try stage.run("migrate")
        #expect(stage.prints("the router is up to date", migrated), "\(migrated)")
    }

    @Test func `a wrong map, or a role without the rights, is refused and changes nothing`() throws {
        let stage = try Stage()
        #expect(try stage.run("migrate").status == 0)
        let swapped = try stage.file(TestShards.mapText(stage.shards.reversed()))
        let otherNumber = "shard 0 of 2 in the map is shard 1 of 2, which is fixed forever"
        let alone = try stage.file(TestShards.mapText([stage.shards[0]]), "alone.toml")
        for (map, problem) in [
            (swapped, otherNumber), (alone, "shard 0 of 1 in the map is shard 0 of 2, which is fixed forever"),
            (
                try stage.file("shards = [\"dbname=a\", \"dbname=b\", \"dbname=c\"]\n", "three.toml"),
                "three.toml: the shard map: it has 3 shards, expected a power of two"
            ),
            (
                try stage.file("shards = [\"dbname=a password=secret\", \"dbname=b\"]\n", "password.toml"),
                "password.toml: the shard map: shard 0: a password in the map"
            ),
            (try stage.file("map = [\"dbname=a\"]\n", "key.toml"), "key.toml:1: found map, expected only shards"),
            ("/nonexistent/shards.toml", "/nonexistent/shards.toml cannot be read: "),
        ] {
            for router in 0..<2 {
                let refused = try stage.run("migrate", map: map, on: router)
                #expect(refused.status == 78 && refused.output == "", "\(refused)")
                #expect(refused.errors.contains(problem) && !refused.errors.contains("secret"), "\(refused)")
            }
            let printed = try stage.run("migrate", "--print", map: map)
            #expect(printed.status == 78 && printed.output == "" && printed.errors.contains(problem), "\(printed)")
        }
        let checked = try stage.run("check", map: swapped)
        #expect(checked.status == 1 && checked.output.contains(otherNumber), "\(checked)")
        #expect(
            checked.output.contains("shard 1 of 2 in the map is shard 0 of 2, which is fixed forever"), "\(checked)")

        let role = try stage.run("migrate", on: 1, as: "owner")
        #expect(role.status == 78 && role.errors.contains("owner is not a superuser of the router"), "\(role)")
        let noMap = try ProgramRun([DaemonProcess.program, "router", "migrate"])
        #expect(noMap.status == 64 && noMap.errors.contains("--shards"), "\(noMap)")
        let ledger = try ProgramRun(
            [DaemonProcess.program, "router", "migrate", "--shards", stage.map, "--shard-user", "owner"],
            environment: ["TOKENKEEPER_DATABASE_URL": stage.shards[0].url(user: "postgres")])
        #expect(ledger.status == 69 && ledger.errors.contains("has a ledger of its own"), "\(ledger)")

        let check = try stage.run("check")
        #expect(stage.prints(Self.agree, check), "\(check)")
        #expect(
            try stage.routers[1].psql("SELECT to_regnamespace('tokenkeeper') IS NULL", user: "postgres") == "t")
    }

    @Test func `check finds what differs, a line each, until it is corrected`() throws {
        let second = try TestCluster.prepared()
        let stage = try Stage(second: second)
        #expect(try stage.run("migrate").status == 0)
        func finds(_ lines: [String], _ comment: Comment) throws {
            let run = try stage.run("check")
            #expect(run.status == 1 && run.errors == "", comment)
            let found = run.output.split(separator: "\n").map(String.init)
            #expect(
                found.count == lines.count && zip(found, lines).allSatisfy { $0.hasPrefix($1) }, "\(comment): \(run)")
        }
        func agrees() throws {
            let run = try stage.run("check")
            #expect(stage.prints(Self.agree, run), "\(run)")
        }
        try agrees()

        try stage.shards[1].psql("REVOKE tokenkeeper_app FROM a_app", user: "postgres")
        try finds(
            ["shard 1: a_app is no login with the role tokenkeeper_app, as it is on the router"], "a revoked role")
        try stage.shards[1].psql("GRANT tokenkeeper_app TO a_app", user: "postgres")
        try agrees()

        // As if an older release had migrated it.
        try stage.shards[1].psql("DELETE FROM tokenkeeper.repeatable WHERE name LIKE 'functions/20_%'")
        try finds(["shard 1: "], "an older schema")
        #expect(try stage.run("check").output.contains("run `tokenkeeperd migrate`"))
        let refused = try stage.run("migrate")
        #expect(
            refused.status == 69 && refused.errors.contains("shard 1: ")
                && refused.errors.contains("run `tokenkeeperd migrate`"), "\(refused)")
        #expect(try stage.shards[1].command("migrate", as: "owner").status == 0)
        try agrees()

        try stage.shards[0].psql("COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS 'x'")
        let stale = "router: it was made from another map or by another release, or logins or the schemas of the shards"
        try finds([stale], "another schema on shard 0")
        let renewed = try stage.run("migrate")
        #expect(stage.prints("the router leads to all shards", renewed), "\(renewed)")
        try agrees()

        second.stop()
        try finds(["shard 1: "], "a shard that is down")
        let unavailable = try stage.run("migrate")
        #expect(unavailable.status == 69 && unavailable.errors.contains("shard 1: "), "\(unavailable)")
        try second.start()
        try agrees()
    }
}
