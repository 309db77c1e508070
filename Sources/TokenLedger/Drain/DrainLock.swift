/// The locks that daemons and operators take among themselves: on tables of the schema, until the transaction ends.
///
/// Not advisory locks: any login of the database can take an advisory lock, even without a single privilege, and could stop the
/// drain. Most of these tables are empty and serve only as locks. Nobody has privileges on them; functions of the schema lock
/// them.
enum DrainLock {
    /// The lock of another session that keeps a batch from beginning.
    enum Refusal: String, ColumnDecodable {
        /// An operator has locked out the drains: no batch begins anywhere.
        case drain
        /// The partition is locked as a whole.
        case partition
        /// Another daemon is working on these pages, or on others that share their slot.
        case range
    }

    /// The number of lock tables that stand for the ranges of all partitions of both queues.
    ///
    /// Two batches whose ranges share a table do not run at once: the later one continues with another range. With eight
    /// connections at work, fewer than a quarter of the attempts meet such a lock, at 0.1 ms each; a batch takes 5 to 40 ms.
    static let rangeSlots = 32

    /// An SQL expression that takes the locks of a batch: null, or a `Refusal`.
    static func batch(_ partition: Partition, firstPage: Int) -> String {
        "tokenkeeper.lock_batch('\(partition.queue.rawValue)', \(partition.number), \(slot(partition, firstPage: firstPage)))"
    }

    /// Neighboring ranges never share a slot, and the same pages of different partitions rarely do. The clock chooses the same partition of
    /// both queues, so these are half of the slots apart.
    static func slot(_ partition: Partition, firstPage: Int) -> Int {
        let offset = partition.queue == .results ? 0 : rangeSlots / 2
        return (firstPage / Partition.pagesPerRange + partition.number * 5 + offset) % rangeSlots
    }

    /// An SQL expression that locks a partition against everybody: false when another session is using it.
    static func partition(_ partition: Partition) -> String {
        "tokenkeeper.lock_partition('\(partition.queue.rawValue)', \(partition.number))"
    }

    /// Waits until no other transaction decides whether a sweep starts.
    static let sweepClaim = "SELECT tokenkeeper.lock_sweep_claim()"

    /// Waits until no other transaction migrates. The schema must exist, and the current user must own it.
    static let migration = "LOCK TABLE tokenkeeper.migration IN EXCLUSIVE MODE"
}

extension BatchTransaction {
    /// Begins a transaction that takes rows off a queue.
    ///
    /// - Returns: The lock of another session that is in the way: then roll back. Nil if this transaction has its locks.
    func beginTaking(
        _ partition: Partition, firstPage: Int, on connection: inout Connection
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        try connection.run(
            """
            \(beginUnsorted)
            SELECT \(DrainLock.batch(partition, firstPage: firstPage))
            """
        ).value()
    }

    /// Without statistics of the queue, the planner would sort rows that are only counted.
    var beginUnsorted: String { begin + "SET LOCAL enable_sort = off;" }
}
