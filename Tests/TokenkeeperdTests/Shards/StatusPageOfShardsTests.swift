import LedgerTestSupport
import TestThreads
import Testing

@Suite(.ownThread) struct `The status page of a shard's daemon` {
    @Test func `it sums up all shards, names one that is down and what another one says`() throws {
        let all = try TestShards()
        let shards = all.shards
        let folder = try TemporaryDirectory()
        let map = try folder.write(TestShards.mapText(shards), to: "shards.toml")
        let port = try TestCluster.freePort()
        let daemon = try shards[0].daemon([
            "shards.map=\(map)", "metrics.listen=127.0.0.1:\(port)", "drain.poll_idle=50ms",
        ])
        let others = try shards.dropFirst().map { try $0.daemon(["shards.map=\(map)", "drain.poll_idle=50ms"]) }
        func page() -> String { PlainClient.get("/", port) }
        func isInAttention(_ words: String) -> Bool {
            page().contains("<section class=\"attention critical\">")
                && page().contains("<li class=\"critical\">\(words)")
        }

        for number in 1...40 {
            try all.routers[0].psql(
                "SELECT tokenkeeper.register(encode(sha256('\(number)'), 'hex'), 't')", user: "a_app")
        }
        try eventually("the tokens of all shards are counted") {
            // The daemons count every ten minutes.
            for shard in shards {
                try shard.psql("SELECT tokenkeeper.count_tokens(t.topic_id, 1000) FROM tokenkeeper.topic AS t")
            }
            return page().contains("<td class=\"name\">all \(shards.count)</td>")
                && page().contains("<td class=\"number\">40</td>")
                && page().contains("<td class=\"name\">0, this one</td>")
        }
        #expect(page().contains("<td class=\"number\">\(shards.count)</td></tr>"), "live daemons")

        try all.withShardDown(1) {
            try eventually("the missing shard is named") {
                isInAttention("shard 1 does not answer: ")
                    && page().contains("<td class=\"name\">3 of 4: those that answer</td>")
            }
        }
        try eventually("it is back") { !page().contains("does not answer") }
        try shards[1].psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'not hex', 410)",
            user: "a_sender")
        try eventually("what another shard says is here, with its number") { page().contains("<li>shard 1: 1 ") }
        for one in [daemon] + others { #expect(one.stop() == 0) }
    }
}
