/// When the shards of a round have their work.
///
/// On a machine with fewer cores than shards, four servers that work at the same time take the caches of the processor from each other.
/// If they work one after the other, that cannot be the reason for a difference.
enum ShardOrder {
    /// Calls alternate between the shards, and all shards drain at once.
    case together
    /// All work of a shard comes before that of the next.
    case inTurn
}
