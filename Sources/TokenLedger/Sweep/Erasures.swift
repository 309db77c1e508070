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

/// A person's right to erasure.
public struct Erasure: Sendable {
    public enum Subject: Sendable {
        /// In any spelling.
        case token(String)
        case device(String)
        case user(String)
    }

    public let subject: Subject

    public init(_ subject: Subject) { self.subject = subject }

    /// Deletes what is stored. Waits for up to ten seconds for a token that another session has locked.
    ///
    /// - Parameter dryRun: Whether to count only: everything is rolled back.
    /// - Returns: How many rows. What is queued is dropped later, and does not count.
    public func perform(dryRun: Bool, on connection: inout Connection) throws(DatabaseError) -> Int64 {
        let (function, name) =
            switch subject {
            case .token(let token): ("forget", token)
            case .device(let device): ("forget_device", device)
            case .user(let user): ("forget_user", user)
            }
        try connection.run("BEGIN")
        let rows: Int64 = try connection.query("SELECT tokenkeeper.\(function)($1)", [.text(name)]).value()
        try connection.run(dryRun ? "ROLLBACK" : "COMMIT")
        return rows
    }
}
