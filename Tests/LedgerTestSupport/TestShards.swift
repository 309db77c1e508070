import TokenLedger

/// Four shards in three clusters, and two routers. All logins of a prepared cluster exist on each.
public struct TestShards: Sendable {
    /// In the order of their numbers. The first two share a cluster with the routers.
    public let shards: [TestDatabase]
    public let routers: [TestDatabase]
    public let map: ShardMap

    /// - Parameter migrated: Whether the routers are made.
    public init(migrated: Bool = true) throws {
        let (second, third) = (try Self.second.get(), try Self.third.get())
        let clusters = [TestCluster.shared, .shared, second, third]
        shards = try clusters.map { try $0.database() }
        routers = try (0..<2).map { _ in try TestCluster.shared.database(migrated: false) }
        map = try ShardMap(shards.map(Self.connection))
        guard migrated else { return }
        for router in routers {
            var connection = try router.connect(user: "postgres")
            _ = try self.router().migrate(&connection)
        }
    }

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
