/// When the shards of a round have their work.
///
/// On a machine with fewer cores than shards, four servers that work at the same time take the caches of the processor from each other.
/// What is left of a difference when they work one after the other is not due to that.
enum ShardOrder {
    /// Calls alternate between the shards, and all shards drain at once.
    case together
    /// All work of a shard comes before that of the next.
    case inTurn
}
