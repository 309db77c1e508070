/// The locks that daemons, `forget` and operators take among themselves: on tables of the schema, until the transaction ends.
///
/// No advisory locks: any login of the database can take those, and one without a single right stopped the drain. Most of these tables
/// are empty and there for nothing else (versions/0004_queue); nobody has rights to them, and functions of the schema lock them.
enum DrainLock {
    /// What keeps a batch from its locks.
    enum Refusal: String {
        /// `forget` is running: no batch begins anywhere.
        case erasure
        /// Another session has locked the partition as a whole.
        case partition
        /// Another daemon works on these pages, or on others that share their slot.
        case range
    }

    /// As many tables stand for the ranges of all partitions.
    ///
    /// Two batches whose ranges share a table do not run at once: the later one goes on with another range. With eight connections at
    /// work, fewer than a quarter of the attempts meet that, at 0.1 ms each; a batch takes 5 to 40 ms.
    static let rangeSlots = 32

    /// Takes the locks of a batch: an expression that is null, or the `Refusal`.
    static func batch(_ partition: Partition, firstPage: Int) -> String {
        "tokenkeeper.lock_batch(\(partition.number), \(slot(partition, firstPage: firstPage)))"
    }

    /// Neighbours never share a slot, and the same pages of other partitions rarely do.
    static func slot(_ partition: Partition, firstPage: Int) -> Int {
        (firstPage / Partition.pagesPerRange + partition.number * 5) % rangeSlots
    }

    /// Locks a partition against everybody: an expression that is false when somebody is in the way.
    static func partition(_ partition: Partition) -> String { "tokenkeeper.lock_partition(\(partition.number))" }

    /// Waits until this transaction alone decides whether a sweep starts.
    static let sweepClaim = "SELECT tokenkeeper.lock_sweep_claim()"

    /// Waits until this transaction alone migrates. The schema must be there, and its owner is who migrates.
    static let migration = "LOCK TABLE tokenkeeper.migration IN EXCLUSIVE MODE"
}

extension BatchTransaction {
    /// Begins one that takes results off the queue.
    ///
    /// - Returns: What another session holds of its locks, then roll back; nil when it has them.
    func beginTaking(
        _ partition: Partition, firstPage: Int, on connection: inout Connection
    ) throws(DatabaseError) -> DrainLock.Refusal? {
        let word = try connection.run(
            """
            \(beginUnsorted)
            SELECT \(DrainLock.batch(partition, firstPage: firstPage))
            """
        ).text(0, 0)
        guard let word else { return nil }
        guard let refusal = DrainLock.Refusal(rawValue: word) else {
            throw DatabaseError(sqlState: "0A000", message: "tokenkeeper.lock_batch returned an unknown word")
        }
        return refusal
    }

    /// The planner knows nothing of a queue: it would sort what is to be counted.
    var beginUnsorted: String { begin + "SET LOCAL enable_sort = off;" }
}
