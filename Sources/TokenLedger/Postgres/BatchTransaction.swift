internal import TokenModel

/// How a transaction begins: its isolation, access mode and timeouts.
///
/// The settings are always `SET LOCAL`: behind a transaction pooler a session setting would leak into other applications. The
/// timeouts also release the locks of a process that was stopped in the middle of a transaction.
struct BatchTransaction {
    /// What the transaction sees, and whether it writes.
    enum Mode: String {
        case readWrite = "ISOLATION LEVEL READ COMMITTED READ WRITE"
        /// All statements see the same moment. Works on a standby.
        case snapshot = "ISOLATION LEVEL REPEATABLE READ READ ONLY"
    }

    var mode = Mode.readWrite
    /// How long to wait for a lock. A daemon's is below the server's `deadlock_timeout`: the daemon yields, and never the application.
    var lockTimeout: Duration
    /// How long one statement may take; nil for as long as the server allows.
    var statementTimeout: Duration? = .seconds(60)
    /// Whether instants that are read or written as text are in UTC, whatever the zone of the database.
    var isInUTC = false
    /// Whether the commit must survive a crash of the server right after it. Otherwise the next run repeats the work.
    var isDurable = false

    /// A person's command. It waits for the batches of the daemons.
    static let command = BatchTransaction(
        lockTimeout: .seconds(60), statementTimeout: nil, isInUTC: true, isDurable: true)

    var begin: String {
        """
        BEGIN \(mode.rawValue);
        \(settings)
        \(isDurable ? "" : "SET LOCAL synchronous_commit = off;")

        """
    }

    /// For a script that is one implicit transaction. `jit` costs more than it saves here.
    var settings: String {
        """
        \(OwnNames.setting)
        SET LOCAL lock_timeout = '\(lockTimeout.milliseconds)ms';
        \(statementTimeout.map { "SET LOCAL statement_timeout = '\($0.milliseconds)ms';" } ?? "")
        SET LOCAL idle_in_transaction_session_timeout = '60s';
        \(isInUTC ? "SET LOCAL timezone = 'UTC';" : "")
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
    /// Runs a transaction: commits what `work` has done, or rolls back and throws its error.
    ///
    /// - Parameter settings: Statements to run first, such as a lock or `SET LOCAL`.
    mutating func transaction<Value>(
        _ transaction: BatchTransaction, settings: String = "",
        _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        do {
            try run(transaction.begin + settings)
            let value = try work(&self)
            try commit()
            return value
        } catch {
            rollback()
            throw error
        }
    }

    /// Reads what somebody waits for: all of it as of one moment, and rather not at all than late. Works on a standby.
    ///
    /// - Parameter limit: How long a statement may take. Of a connection with a deadline it may take half of the time that is left, so that something
    ///   else can still be read if this takes too long.
    mutating func snapshot<Value>(
        within limit: Duration, settings: String = "", _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value {
        let left = deadline.map { ContinuousClock.now.duration(to: $0) / 2 }
        // 0 would mean no limit.
        let statement = max(min(limit, left ?? limit), .milliseconds(1))
        return try transaction(
            BatchTransaction(
                mode: .snapshot, lockTimeout: .milliseconds(100), statementTimeout: statement, isInUTC: true),
            settings: settings, work)
    }

    /// Runs a transaction whose work may also throw errors other than `DatabaseError`.
    mutating func transaction<Value>(
        _ transaction: BatchTransaction, settings: String = "", _ work: (inout Connection) throws -> Value
    ) throws -> Value {
        do {
            try run(transaction.begin + settings)
            let value = try work(&self)
            try commit()
            return value
        } catch {
            rollback()
            throw error
        }
    }
}
