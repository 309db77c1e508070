/// A sealed partition: no application writes to it any more. So it can be truncated: nothing is left to vacuum.
///
/// A partition of results can also be read in bulk before (`Record/BulkRead.swift`).
struct SealedPartition {
    let partition: Partition
    let transaction: BatchTransaction

    /// Begins a transaction and locks the partition against everybody.
    ///
    /// The lock comes before the statements that read: a row committed in between would be lost. With NOWAIT it disturbs no other
    /// session, and no session queues up behind it.
    ///
    /// - Returns: False when a writer, a dump, or another daemon is using the partition, or an operator has locked out the drains; then no transaction is open.
    func lock(on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            let isOurs: Bool = try connection.run(
                """
                \(transaction.beginUnsorted)
                SELECT \(DrainLock.partition(partition))
                """
            ).value()
            if isOurs { return true }
            connection.rollback()
            return false
        } catch {
            connection.rollback()
            if error.remedy == .retry { return false }
            throw error
        }
    }

    /// Gives back the space of a drained partition, so that nothing is left to vacuum.
    ///
    /// - Returns: Whether it was empty; nil when another session is using the partition.
    func truncateIfEmpty(on connection: inout Connection) throws(DatabaseError) -> Bool? {
        do {
            guard try lock(on: &connection) else { return nil }
            let isEmpty = try connection.run("SELECT 1 FROM \(partition.table) LIMIT 1").count == 0
            if isEmpty { try connection.run("TRUNCATE \(partition.table)") }
            try connection.commit()
            return isEmpty
        } catch {
            connection.rollback()
            if error.remedy == .reconnect { throw error }
            return nil
        }
    }
}
