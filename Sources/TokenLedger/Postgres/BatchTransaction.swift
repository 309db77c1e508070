/// How every transaction of the daemon begins.
///
/// `SET LOCAL` always: behind a transaction pooler a session setting would leak into other applications.
struct BatchTransaction {
    /// How long to wait for a lock: below the server's `deadlock_timeout`, so that the daemon yields and never the application.
    var lockTimeout: Duration
    /// How long one statement may take.
    var statementTimeout: Duration = .seconds(60)

    var begin: String { beginDurable + "\nSET LOCAL synchronous_commit = off;\n" }

    /// For what must not be forgotten once it is committed: what the world is told in between cannot be rolled back.
    var beginDurable: String {
        """
        BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
        \(settings)
        """
    }

    /// For a script that is one implicit transaction.
    ///
    /// The timeouts also free others from a daemon that was stopped in the middle. `jit` costs more than it brings here.
    var settings: String {
        """
        SET LOCAL lock_timeout = '\(lockTimeout.milliseconds)ms';
        SET LOCAL statement_timeout = '\(statementTimeout.milliseconds)ms';
        SET LOCAL idle_in_transaction_session_timeout = '60s';
        SET LOCAL jit = off;
        """
    }
}

extension Duration {
    /// Whole milliseconds, rounded down.
    package var milliseconds: Int64 {
        components.seconds * 1000 + components.attoseconds / 1_000_000_000_000_000
    }
}

extension Connection {
    /// Runs a transaction: commits what `work` has done, or rolls back and passes its error on.
    mutating func transaction<Value>(
        _ opening: String, _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        do {
            try run(opening)
            let value = try work(&self)
            try commit()
            return value
        } catch {
            rollback()
            throw error
        }
    }
}
