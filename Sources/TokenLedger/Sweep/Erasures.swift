/// What `forget` has left to the daemons: `tokenkeeper.erasure`.
public enum Erasures {
    /// Finishes up to a hundred erasures of which nothing older is queued or running.
    ///
    /// - Returns: How many.
    public static func finishNext(on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.run("SELECT tokenkeeper.finish_erasures()").value()
        }
    }
}
