import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// Campaigns of a router: real daemons of all shards and a fake APNs, and `tokenkeeperd campaign` with the router's database.
@Suite(.ownThread) struct `Campaigns of all shards` {
    private let shards: TestShards
    private var router: TestDatabase { shards.routers[0] }

    init() throws {
        shards = try TestShards()
    }

    private func register(_ topic: String) throws {
        try router.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(topic)', tags => '{World}')) FROM generate_series(1, 400) AS i",
            user: "a_app")
    }

    private func enqueue(_ topic: String, _ arguments: String) throws -> String {
        try router.psql(
            "SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', '\(topic)', \(arguments))", user: "a_sender")
    }

    @Test func `the daemons of all shards send a campaign to each token once, and watch shows its end`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try register(stage.topic)
        let daemons = try shards.shards.map {
            try DaemonProcess(
                $0.url(), settings: stage.servers + stage.key, environment: ["RUNTIME_DIRECTORY": stage.runtime.path])
        }
        let campaign = try enqueue(stage.topic, "tags => 'World', idempotency_key => 'k'")
        let watched = try router.command("campaign", "show", campaign, "--watch", as: "a_reader")
        #expect(watched.status == 0, "\(watched)")
        for line in [
            "campaign \(campaign) to \(stage.topic) (production) is ended\n", "  addressed    400\n",
            "  accepted     400\n",
        ] { #expect(watched.output.contains(line), "\(line): \(watched)") }
        #expect(stage.sends.count == 400 && stage.sends.values.allSatisfy { $0 == 1 }, "each token has its own apns-id")
        let tokens = Set(stage.apns.records.exchanges.compactMap(\.request.token))
        #expect(tokens.count == 400)
        let request = try #require(stage.apns.records.exchanges.first?.request)
        #expect(
            try router.psql(
                "SELECT campaign_id, state FROM tokenkeeper.delivery('\(request.apnsID)')", user: "a_sender")
                == "\(campaign)|accepted")
        #expect(try enqueue(stage.topic, "tags => 'World', idempotency_key => 'k'") == campaign)
        for daemon in daemons { #expect(daemon.stop() == 0) }
        #expect(stage.sends.count == 400, "the repetition sends nothing")
    }

    @Test func `campaigns are listed, shown, paused, resumed, cancelled, and get a rate`() throws {
        try register("t")
        let first = try enqueue("t", "everyone => true, name => 'Mars'")
        let second = try enqueue("t", "tags => 'World'")
        let lines = try router.command("campaign", "list", as: "a_reader").output.split(separator: "\n")
        try #require(lines.count == 2, "\(lines)")
        #expect(lines[0].hasPrefix("\(second)  ") && lines[1].hasPrefix("\(first) \"Mars\"  "), "the newest first")
        let json = try #require(
            try JSONSerialization.jsonObject(
                with: Data(try router.command("campaign", "show", first, "--json", as: "a_sender").output.utf8))
                as? [String: Any])
        #expect(
            json["shards"] as? [Int] == [0, 1, 2, 3] && json["waits_because"] as? String == "no running daemon sends")
        for (command, output) in [
            ("resume", "was not paused"),
            ("pause", "is paused; to go on: tokenkeeperd campaign resume \(first)"), ("resume", "goes on"),
            ("cancel", "is cancelled"), ("cancel", "was over already"),
        ] {
            let ran = try router.command("campaign", command, first, as: "a_sender")
            #expect(ran.status == 0 && ran.output == "campaign \(first) \(output)\n", "\(command): \(ran)")
        }
        let rate = try router.command("campaign", "rate", second, "103", as: "a_operator")
        #expect(rate.output == "campaign \(second) sends 103 requests per second\n", "\(rate)")
        #expect(
            try shards.shards.map {
                try $0.psql("SELECT max_per_second FROM tokenkeeper.campaign WHERE campaign_id = \(second)")
            } == ["26", "26", "26", "25"])
        let low = try router.command("campaign", "rate", second, "3", as: "a_operator")
        #expect(low.status == 69 && low.errors.contains("max_per_second is 3, expected 4 to 1000000"), "\(low)")
        for command in ["show", "pause", "cancel"] {
            let ran = try router.command("campaign", command, "999999", as: "a_operator")
            #expect(ran.status == 64 && ran.errors.contains("there is no campaign 999999"), "\(ran)")
        }
        let refused = try router.command("campaign", "cancel", second, as: "a_reader")
        #expect(
            refused.status == 69 && refused.errors.contains("needs the rights of tokenkeeper_operator"), "\(refused)")
    }

    @Test func `a shard that is down is named by its number, as by the other commands`() throws {
        try register("t")
        let campaign = try enqueue("t", "everyone => true")
        try shards.withShardDown(2) {
            for ran in [
                try router.command("campaign", "list", as: "a_reader"),
                try router.command("campaign", "show", campaign, "--json", as: "a_sender"),
                try router.command("campaign", "show", campaign, "--watch", as: "a_reader"),
            ] {
                #expect(ran.status == 69 && ran.output.isEmpty, "\(ran)")
                #expect(ran.errors.hasPrefix("tokenkeeperd: shard 2: connection to server "), "\(ran)")
                #expect(ran.errors.contains("not currently accepting connections (SQLSTATE 08001)\n"), "\(ran)")
            }
            let paused = try router.command("campaign", "pause", campaign, as: "a_sender")
            #expect(paused.status == 69 && paused.errors.contains("shard 2"), "\(paused)")
        }
    }
}
