import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// The commands with the database of a router: they do on all shards what they do on one database, and name a shard that does not answer.
@Suite(.ownThread) struct `Commands on a router` {
    private let stage: TestShards
    private var router: TestDatabase { stage.routers[0] }
    /// Two tokens of each shard, in the order of the shards.
    private let tokens: [[String]]

    init() throws {
        stage = try TestShards()
        var found = [[String]](repeating: [], count: 4)
        let first = stage.shards[0]
        let numbered = try first.psql(
            "SELECT t, tokenkeeper.shard_of(t, 4) FROM (SELECT 'aabbccdd' || lpad(to_hex(i), 56, '0') AS t FROM generate_series(1, 60) AS i) AS s"
        ).split(separator: "\n").map { $0.split(separator: "|").map(String.init) }
        for pair in numbered {
            if let shard = Int(pair[1]), found[shard].count < 2 { found[shard].append(pair[0]) }
        }
        tokens = found
    }

    /// Registers all tokens of one user, and reports half of them as stale.
    private func register() throws {
        for (number, tokens) in tokens.enumerated() {
            for token in tokens {
                try router.psql(
                    "SELECT tokenkeeper.register('\(token)', 't', registered_at => '2026-01-01Z', device_id => 'd-\(token)', user_id => 'ann', tags => '{news}')",
                    user: "a_app")
            }
            try router.psql(
                "SELECT tokenkeeper.unregister('\(tokens[0])', 't', at => '2026-01-02Z')", user: "a_app")
            #expect(try stage.shards[number].psql("SELECT count(*) FROM tokenkeeper.token") == "2")
        }
    }

    /// Shard 3 comes after the one that is down, and has its turn all the same.
    private func withShardDown(_ work: () throws -> Void) throws {
        try stage.withShardDown(2, work)
    }

    private func isNamed(_ run: ProgramRun) -> Bool {
        run.errors.contains("shard 2: ") && run.errors.contains("not currently accepting connections")
    }

    @Test func `explain prints of a token what it prints on its shard, and asks no other`() throws {
        try register()
        for (number, tokens) in tokens.enumerated() {
            for arguments in [[tokens[0]], [tokens[1].uppercased()], [tokens[0], "--json"]] {
                func explain(_ database: TestDatabase) throws -> ProgramRun {
                    try ProgramRun(
                        [DaemonProcess.program, "explain", "--database-url", database.url(user: "a_reader")] + arguments
                    )
                }
                let (there, here) = (try explain(stage.shards[number]), try explain(router))
                #expect(here.status == 0 && here.output == there.output && here.errors == "", "\(here)")
                #expect(here.output.contains(tokens[0]) || here.output.contains(tokens[1]))
            }
        }
        try withShardDown {
            let other = try router.command("explain", tokens[0][0], as: "a_reader")
            #expect(other.status == 0 && other.output.contains("the app unregistered it") && other.errors == "")
            let own = try router.command("explain", tokens[2][0], as: "a_reader")
            #expect(own.status == 69 && own.output == "" && isNamed(own), "\(own)")
        }
    }

    @Test
    func
        `explain finds the tokens of a user, of a device and of a tag on all shards, and those that begin with some digits`()
        throws
    {
        try register()
        let all = tokens.flatMap { $0 }.sorted()
        func listed(_ output: String) -> [String] {
            output.split(separator: "\n").filter { $0.hasPrefix("t (production) ") }.map { String($0.dropFirst(15)) }
        }
        #expect(try listed(router.command("explain", "--user", "ann", as: "a_reader").output) == all)
        #expect(try listed(router.command("explain", "aabbccdd", as: "a_reader").output) == all)
        #expect(
            try listed(router.command("explain", "--device", "d-\(tokens[2][1])", as: "a_reader").output)
                == [tokens[2][1]])
        let tagged = try router.command("explain", "--tag", "news", "--topic", "t", as: "a_reader")
        #expect(tagged.output.split(separator: "\n").count == 8, "\(tagged)")
        let json = try router.command("explain", "--user", "ann", "--json", as: "a_reader").output
        let parsed = try #require(try JSONSerialization.jsonObject(with: Data(json.utf8)) as? [[String: Any]])
        #expect(parsed.compactMap { $0["token"] as? String } == all)
        let nothing = try router.command("explain", "--user", "bob", as: "a_reader")
        #expect(nothing.status == 0 && nothing.output.hasPrefix("no token of that user is known"), "\(nothing)")
        // Eleven tokens begin with these digits: too many for a person who means one.
        for number in 100..<103 {
            let token = "aabbccdd" + String(format: "%056x", number)
            try router.psql("SELECT tokenkeeper.register('\(token)', 't')", user: "a_app")
        }
        let many = try router.command("explain", "aabbccdd", as: "a_reader")
        #expect(many.status == 64 && many.errors.contains("that fits 11 tokens: give more digits"), "\(many)")
        try withShardDown {
            let partly = try router.command("explain", "--user", "ann", as: "a_reader")
            #expect(partly.status == 69 && isNamed(partly), "\(partly)")
            #expect(listed(partly.output) == (tokens[0] + tokens[1] + tokens[3]).sorted())
            #expect(
                try router.command("explain", "--tag", "news", "--topic", "t", as: "a_reader").output
                    .split(separator: "\n").count == 6)
        }
    }

    @Test func `status adds up, and its check is critical while a shard is down`() throws {
        try register()
        try router.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token) SELECT 't', encode(sha256(i::text::bytea), 'hex') FROM generate_series(1, 100) AS i",
            user: "a_sender")
        let text = try router.command("status", as: "a_reader")
        #expect(text.status == 0 && text.errors == "", "\(text)")
        #expect(text.output.contains("queue depth") && text.output.contains("  100\n"), "\(text)")
        let json = try router.command("status", "--json", as: "a_operator")
        #expect(json.output.contains("\"queue_depth\":100,"), "\(json)")
        try withShardDown {
            let check = try router.command("status", "--check", as: "a_reader")
            #expect(check.status == 2, "\(check)")
            #expect(check.output.hasPrefix("TOKENKEEPER CRITICAL - shard 2 does not answer: "), "\(check)")
            let named = try router.command("status", as: "a_reader")
            #expect(named.status == 0 && named.output.hasPrefix("critical: shard 2 does not answer: "), "\(named)")
        }
    }

    @Test func `what is held or rejected is listed and decided on each shard`() throws {
        #expect(try router.command("held", as: "a_reader").output == "shards 0, 1, 2, 3: nothing is held\n")
        #expect(try router.command("rejected", as: "a_reader").output == "shards 0, 1, 2, 3: nothing is rejected\n")
        // A result with a malformed token is on shard 0. One without a status is on the shard of its token.
        try router.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'zz', '410'), ('t', '\(tokens[2][0])', 'x')",
            user: "a_sender")
        for shard in [stage.shards[0], stage.shards[2]] {
            let daemon = try shard.daemon()
            try eventually("it is rejected") {
                try shard.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "1"
            }
            #expect(daemon.stop() == 0)
        }
        let listed = try router.command("rejected", as: "a_reader")
        #expect(listed.output.hasPrefix("shard 0:\n1  device token"), "\(listed)")
        #expect(listed.output.contains("\n\nshards 1, 3:\nnothing is rejected"), "\(listed)")
        #expect(listed.output.contains("shard 2:\n1  "), "\(listed)")
        let ids = try router.command("rejected", "requeue", "1", as: "a_operator")
        #expect(ids.status == 64 && ids.output == "", "\(ids)")
        #expect(ids.errors.contains("this database is a router: rejected_id values are those of one shard"), "\(ids)")
        let discarded = try router.command("rejected", "discard", "--all", as: "a_operator")
        #expect(
            discarded.output == "shards 0, 2: 1 result is deleted\nshards 1, 3: 0 results are deleted\n",
            "\(discarded)")
        let rights = try router.command("held", "release", "--topic", "t", as: "a_reader")
        #expect(
            rights.status == 69 && rights.errors.contains("needs the rights of tokenkeeper_operator there"), "\(rights)"
        )
        // Only one shard has heard of the topic.
        try router.psql("SELECT tokenkeeper.register('\(tokens[1][0])', 't')", user: "a_app")
        let released = try router.command("held", "release", "--topic", "t", as: "a_operator")
        #expect(released.status == 0 && released.output.contains("0 results are back in the queue"), "\(released)")
        try withShardDown {
            let held = try router.command("held", as: "a_reader")
            #expect(held.status == 69 && isNamed(held), "\(held)")
            #expect(held.output == "shards 0, 1, 3: nothing is held\n")
        }
    }

    @Test func `reinstate and sweep do their work on one shard after the other`() throws {
        try register()
        let window = ["--topic", "t", "--since", "2026-01-01Z", "--until", "2026-01-03Z"]
        let none = try ProgramRun(
            [DaemonProcess.program, "reinstate", "--dry-run", "--database-url", router.url(user: "a_operator")] + window
        )
        #expect(none.status == 0, "\(none)")
        #expect(
            none.output.hasPrefix("shards 0, 1, 2, 3:\nsuspects of t (production) from ")
                && none.output.hasSuffix("\n0 tokens would be sendable again\n"), "\(none)")
        let unknown = try router.command(
            "reinstate", "--topic", "unknown", "--since", "2026-01-01Z", as: "a_operator")
        #expect(unknown.status == 69 && unknown.errors.contains("is not known in environment"), "\(unknown)")
        for shard in stage.shards {
            try shard.psql(
                "UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '1 year' WHERE suppressed_since IS NOT NULL"
            )
        }
        let swept = try router.command("sweep", "--dry-run", as: "a_daemon")
        #expect(swept.status == 0 && swept.errors == "", "\(swept)")
        #expect(swept.output.contains("would delete 1 suppressed token past sweep.suppressed_retention"), "\(swept)")
        let alone = try router.command("sweep", as: "a_operator")
        #expect(
            alone.status == 69 && alone.errors.contains("shard 3: no daemon is running on this database"), "\(alone)")
        try withShardDown {
            let partly = try router.command("sweep", as: "a_daemon")
            #expect(partly.status == 69 && isNamed(partly), "\(partly)")
            #expect(
                try [0, 1, 3].map {
                    try stage.shards[$0].psql("SELECT count(*) FROM tokenkeeper.sweep_run WHERE NOT dry_run")
                }
                    == ["1", "1", "1"])
        }
    }

    @Test func `doctor checks every shard, and what a router cannot do is refused in one sentence`() throws {
        let doctor = try router.command("doctor", as: "a_reader")
        #expect(doctor.output.contains("leads to 4 shards"), "\(doctor)")
        #expect(doctor.output.contains("all shards: fits tokenkeeperd"), "\(doctor)")
        try withShardDown {
            let partly = try router.command("doctor", as: "a_reader")
            #expect(partly.status == 1, "\(partly)")
            #expect(partly.output.contains("PostgreSQL") && partly.output.contains("shard 2: "), "\(partly)")
            #expect(partly.output.contains("shards 0, 1, 3: fits tokenkeeperd"), "\(partly)")
        }
        let sentence = "this database is a router, which has no ledger: name the database of a shard"
        for command in [
            ["run"], ["migrate"], ["grants"], ["check-config", "--online"], ["attachments"], ["withdraw", "1"],
            ["compare", "devices"],
        ] {
            let refused = try ProgramRun(
                [DaemonProcess.program] + command,
                environment: ["TOKENKEEPER_DATABASE_URL": router.url(user: "postgres")])
            #expect(refused.status != 0 && refused.errors.contains(sentence), "\(command): \(refused)")
        }
    }
}
