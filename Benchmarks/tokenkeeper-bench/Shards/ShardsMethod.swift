/// The text on how shards and routers are measured.
struct ShardsMethod {
    let scale: Scale

    var lines: [String] {
        [
            "- **The servers** are \(ShardFleet.counts.last!) clusters for the shards, with a shard each, and one for the routers, all private, durable and of the same version. The databases of",
            "  1, 2 and 4 shards are different ones, made by `tokenkeeperd router migrate`'s code. A shard has \(Scale.short(scale.shardTokens)) active tokens, however many shards there are, and a tenth more",
            "  that have long been suppressed; all are in memory. Processor time is that of all processes of a cluster, from /proc. That of the client is not counted.",
            "- **Connections**: one client makes one call after the other. Straight, it has a connection to each shard and knows from the map which one to take. Through the router, it has one",
            "  connection; the router's session then has one to each shard for PL/Proxy, and another one for `postgres_fdw` (queues and views). All are local sockets and stay open.",
            "- **The calls** are prepared statements, with `synchronous_commit` off for the login on router and shards, because otherwise the flush would take most of the time. Each round has",
            "  \(scale.shardCalls) single calls for each shard, or \(scale.shardBatched) tokens or rows for each shard in calls of 1,000. Straight, the client collects 1,000 for each shard, as bulk senders do; the",
            "  router divides a call of 1,000: with four shards, into four of some 250. COPY is one statement for each shard (\(scale.shardCopied) rows each), and one through the router (\(scale.shardCalls) rows for each shard). `register` has active",
            "  tokens without a device, and `is_sendable` those of the whole ledger, of which one in eleven is suppressed. Queues are empty, and a CHECKPOINT comes before each round.",
            "- **The drain**: each shard has \(Scale.short(scale.shardResults)) results in a sealed partition, and a daemon that was stopped (SIGSTOP) while they were written. All daemons are resumed at once, and the",
            "  time runs until the last result of the last shard is counted. They know the shard map, but there are no devices to agree on.",
            "- **One after the other**: otherwise, consecutive calls go to any shard, and all shards drain at once, so that the processes of \(ShardFleet.counts.last!) servers take turns on the cores, and take the",
            "  processor's caches from each other. Servers on machines of their own do not. So the same work is also done with all calls of a shard before those of the next (and a large call through the",
            "  router has tokens of one shard only), or with one daemon resumed after the other. What then remains of a difference is what shards cost.",
            "",
            "This page claims nothing about a network, about routers with many sessions at the same time, or about other machines.",
        ]
    }
}
