public import TokenModel

/// The shards that a router leads to, for commands that connect to each of them.
public struct RoutedShards: Sendable {
    private let map: ShardMap
    /// A login has the same name on the router and on the shards.
    private let user: String
    private let router: DatabaseAddress

    /// - Parameter address: How the connection was made.
    /// - Returns: Nil if the database is no router.
    public init?(
        of connection: inout Connection, at address: DatabaseAddress
    ) throws(DatabaseError) {
        guard try Router.isOne(&connection) else { return nil }
        let connections = try connection.query(
            "SELECT p FROM plproxy.get_cluster_partitions('tokenkeeper_shards') AS p"
        ).values(String.self)
        do {
            map = try ShardMap(connections)
        } catch {
            throw DatabaseError(.configuration, "the map of this router cannot be used: \(error)")
        }
        user = try connection.query("SELECT session_user::text").value()
        router = address
    }

    public var count: ShardCount { map.count }
    public var numbers: Range<Int> { 0..<map.count.number }

    /// How to connect to a shard: as the same login, and with the same password, if the shard asks for one.
    public func address(of number: Int) throws(DatabaseError) -> DatabaseAddress {
        var address = try map.address(of: number, user: user, password: router.password)
        address.passwordFile = router.passwordFile
        return address
    }

    /// Which shards a look-up by these digits concerns, the shard that has the whole token first.
    public func numbers(of digits: TokenDigits) -> [Int] {
        guard digits.canBeWhole, let token = DeviceToken(hex: digits.text) else { return Array(numbers) }
        let own = token.shard(of: map.count)
        return [own] + (digits.isLong ? [] : numbers.filter { $0 != own })
    }
}
