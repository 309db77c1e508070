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

    public func router(daemon: Version = Version(major: 0, minor: 1, patch: 0)) -> Router {
        Router(to: map, shardUser: "owner", daemon: daemon)
    }

    /// The shard that has a token.
    public func shard(of token: String) throws -> TestDatabase {
        let number = try shards[0].psql("SELECT tokenkeeper.shard_of('\(token)', \(shards.count))")
        return shards[Int(number) ?? 0]
    }
}
