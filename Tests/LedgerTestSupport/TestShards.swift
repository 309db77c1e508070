import TokenLedger

/// Four shards in three clusters, and two routers in the first. Each cluster has the logins of `TestCluster.prepared`, and a test creates no others:
/// `Router.check` compares them all.
public struct TestShards: Sendable {
    /// In the order of their numbers. The first two share a cluster.
    public let shards: [TestDatabase]
    public let routers: [TestDatabase]
    public let map: ShardMap

    /// - Parameters:
    ///   - migrated: Whether the routers are made.
    ///   - last: The prepared cluster of the last shard, for a test that stops it; nil for one that tests share.
    public init(migrated: Bool = true, last: TestCluster? = nil) throws {
        let clusters = [
            try Self.first.get(), try Self.first.get(), try Self.second.get(), try last ?? Self.third.get(),
        ]
        shards = try clusters.map { try $0.database() }
        routers = try (0..<2).map { _ in try clusters[0].database(migrated: false) }
        map = try ShardMap(shards.map(Self.connection))
        guard migrated else { return }
        for router in routers { try migrate(router) }
    }

    /// Makes a router.
    ///
    /// - Returns: False if it is one already, and up to date.
    @discardableResult
    public func migrate(_ router: TestDatabase) throws -> Bool {
        var connection = try router.connect(user: "postgres")
        return try self.router().migrate(&connection)
    }

    /// What `router check` finds.
    public func check(_ router: TestDatabase) throws -> [String] {
        var connection = try router.connect(user: "postgres")
        return try self.router().check(&connection)
    }

    private static let first = Result { try TestCluster.prepared() }
    private static let second = Result { try TestCluster.prepared() }
    private static let third = Result { try TestCluster.prepared() }

    /// A connection string of the map, without a user.
    public static func connection(to database: TestDatabase) -> String {
        "host=\(database.cluster.folder) port=\(database.cluster.port) dbname=\(database.name)"
    }

    /// The text of a shard map, as the setting `shards.map` and `router migrate` read it.
    public static func mapText(_ shards: [TestDatabase]) -> String {
        "shards = [\(shards.map { "\"\(connection(to: $0))\"" }.joined(separator: ", "))]"
    }

    /// Lets nobody connect to a shard, and ends the sessions there, while something is done.
    public func withShardDown(_ number: Int, _ work: () throws -> Void) throws {
        let shard = shards[number]
        var admin = try shard.cluster.connect(database: "postgres", user: "postgres")
        try admin.run("ALTER DATABASE \(shard.name) ALLOW_CONNECTIONS false")
        try admin.run("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '\(shard.name)'")
        let result = Result { try work() }
        try admin.run("ALTER DATABASE \(shard.name) ALLOW_CONNECTIONS true")
        try result.get()
    }

    /// Waits until daemons have drained the queues of these shards, and delivered the messages about devices.
    public static func settle(_ shards: [TestDatabase]) throws {
        let waiting = """
            SELECT (SELECT count(*) FROM tokenkeeper.send_result) + (SELECT count(*) FROM tokenkeeper.registration)
                 + (SELECT count(*) FROM tokenkeeper.device_announcement WHERE is_pending)
                 + (SELECT count(*) FROM tokenkeeper.device_notice) + (SELECT count(*) FROM tokenkeeper.device_check)
            """
        // One shard is asked after the other, and a message may move meanwhile.
        var quiet = 0
        try eventually("all is drained and delivered") {
            quiet = try shards.allSatisfy { try $0.psql(waiting) == "0" } ? quiet + 1 : 0
            return quiet == 3
        }
    }

    public func router(daemon: Version = Version(major: 0, minor: 1, patch: 0)) -> Router {
        Router(to: map, shardUser: "owner", daemon: daemon)
    }

    /// The shard that has a token.
    public func shard(of token: String) throws -> TestDatabase {
        let number = try shards[0].psql("SELECT tokenkeeper.shard_of('\(token)', \(shards.count))")
        return shards[Int(number) ?? 0]
    }
}
