import Foundation
import LedgerTestSupport
import TokenLedger

/// Shards, each in a cluster of its own, and their routers in another one, so that the processor time of each can be told apart.
///
/// There is a set of databases for each number of shards. All shards of all sets have equally many tokens.
final class ShardFleet {
    static let counts = [1, 2, 4]

    let router: PrivateCluster
    let clusters: [PrivateCluster]
    private(set) var sets: [ShardSet] = []

    init(_ scale: Scale) throws {
        Progress.say("starting \(Self.counts.last!) clusters for shards, and one for routers")
        let wal = ["max_wal_size=8GB", "min_wal_size=256MB"]
        router = try PrivateCluster(more: wal, sharedBuffersInMB: 128)
        clusters = try (0..<Self.counts.last!).map { _ in
            try PrivateCluster(more: wal, sharedBuffersInMB: min(1024, PrivateCluster.sharedBuffersInMB))
        }
        for cluster in [router] + clusters {
            // As on other pages: otherwise most of the time would be the flush of each commit.
            try cluster.session("postgres").run(
                """
                CREATE ROLE a_sender LOGIN IN ROLE tokenkeeper_sender; ALTER ROLE a_sender SET synchronous_commit = off;
                CREATE ROLE an_app LOGIN IN ROLE tokenkeeper_app; ALTER ROLE an_app SET synchronous_commit = off;
                """)
        }
        for count in Self.counts {
            Progress.say("filling \(count) shards of \(Scale.short(scale.shardTokens)) tokens")
            sets.append(try ShardSet(count, in: clusters, router: router, tokens: scale.shardTokens))
        }
    }

    /// The version of PL/Proxy.
    func proxy() throws -> String {
        try sets[0].router.session().text("SELECT extversion FROM pg_extension WHERE extname = 'plproxy'") ?? ""
    }
}

/// Some shards, and a router that leads to them.
struct ShardSet {
    let count: Int
    let shards: [Database]
    let router: Database
    /// The shard map, for the daemons.
    let map: String
    /// A superuser's session for each shard.
    let sessions: [Session]

    fileprivate init(_ count: Int, in clusters: [PrivateCluster], router: PrivateCluster, tokens: Int) throws {
        self.count = count
        shards = try clusters.prefix(count).map { cluster in
            let database = Database(cluster: cluster, name: "one_of_\(count)")
            try cluster.session("postgres").run("CREATE DATABASE \(database.name) TEMPLATE bare STRATEGY file_copy")
            return database
        }
        self.router = Database(cluster: router, name: "router_\(count)")
        try router.session("postgres").run("CREATE DATABASE \(self.router.name)")
        let connections = shards.map { shard in
            "host=\(shard.cluster.cluster.folder) port=\(shard.cluster.cluster.port) dbname=\(shard.name)"
        }
        var connection = try router.cluster.connect(database: self.router.name)
        _ = try Router(
            to: ShardMap(connections), shardUser: "owner", daemon: Version(major: 0, minor: 1, patch: 0)
        ).migrate(&connection)
        map = "\(router.cluster.folder)/shards_\(count).toml"
        try "shards = [\(connections.map { "\"\($0)\"" }.joined(separator: ", "))]\n".write(
            toFile: map, atomically: true, encoding: .utf8)
        sessions = try shards.map { try $0.session() }
        for number in 0..<count { try fill(number, tokens: tokens) }
    }

    /// The ledger of one shard, and the table `own` with its tokens: `place` numbers those that were active at first, from 0, at random.
    private func fill(_ number: Int, tokens: Int) throws {
        let session = sessions[number]
        for topic in Workload.topics {
            try session.run("INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', '\(topic)')")
        }
        try session.run(
            """
            CREATE TABLE own AS
            SELECT n, token, (ARRAY['\(Workload.topics.joined(separator: "','"))'])[1 + n % 3] AS topic,
                   CASE WHEN n % 11 > 0 THEN row_number() OVER (PARTITION BY n % 11 = 0 ORDER BY md5(token)) - 1 END AS place
            FROM (SELECT n, encode(sha256(n::text::bytea), 'hex') AS token FROM generate_series(1, \(tokens / 10 * 11 * count)) AS n) AS t
            WHERE tokenkeeper.shard_of(token, \(count)) = \(number)
            """)
        try session.run(
            """
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, stale_at, stale_reason, suppressed_since)
            SELECT 1 + n % 3, decode(token, 'hex'), b.base - CASE WHEN place IS NULL THEN interval '200 days' ELSE interval '10 days' END,
                   CASE WHEN place IS NULL THEN b.base - interval '150 days' END,
                   CASE WHEN place IS NULL THEN 'Unregistered' END,
                   CASE WHEN place IS NULL THEN b.base - interval '20 days' END
            FROM own, (SELECT to_timestamp(\(Workload.base / 1000)) AS base) AS b ORDER BY n
            """)
        for table in ["own", "tokenkeeper.ledger", "tokenkeeper.topic"] { try session.run("VACUUM (ANALYZE) \(table)") }
    }

    /// Everything of a shard is in memory and on disk, so that what is timed next starts from the same state in each round.
    func settle() throws {
        for session in sessions {
            try session.run(
                """
                SELECT pg_prewarm('tokenkeeper.ledger'), pg_prewarm('tokenkeeper.ledger_pkey'),
                       pg_prewarm('tokenkeeper.ledger_suppressed'), pg_prewarm('tokenkeeper.ledger_suppressed_key')
                """)
            try session.run("CHECKPOINT")
        }
    }
}
