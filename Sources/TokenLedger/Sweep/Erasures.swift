/// What `forget` has left to the daemons: `tokenkeeper.erasure`.
public enum Erasures {
    /// Finishes up to a hundred erasures of which nothing older is queued or running.
    ///
    /// - Returns: How many.
    public static func finishNext(on connection: inout Connection) throws(DatabaseError) -> Int64 {
        // It reads the queues and the outbox.
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: .seconds(60))
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.run("SELECT tokenkeeper.finish_erasures()").value()
        }
    }
}
