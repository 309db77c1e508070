package import TokenModel

/// Which shard a database is: its row of `tokenkeeper.shard`.
package struct OwnShard: Sendable {
    package let number: Int
    package let count: ShardCount

    /// Nil if the database is not one of several.
    package init?(on connection: inout Connection) throws(DatabaseError) {
        let rows = try connection.query("SELECT s.number, s.shards FROM tokenkeeper.shard AS s").decode {
            row throws(DatabaseError) in (number: try row.read(Int.self), shards: try row.read(Int.self))
        }
        guard let row = rows.first, let count = ShardCount(row.shards) else { return nil }
        (number, self.count) = (row.number, count)
    }
}
