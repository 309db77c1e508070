import APNsFeedback
import LedgerTestSupport
import TokenLedger

/// Drains the queue until a pass moves nothing.
@discardableResult
func drainAll(_ connection: inout Connection, drain: Drain? = nil) throws -> Drain.Pass {
    var drain =
        drain ?? Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
    var sum = Drain.Pass()
    while true {
        let pass = try drain.onePass(on: &connection)
        sum.add(pass)
        if !pass.moved { return sum }
    }
}

/// Performs the undo that `reinstate` has requested, as the daemons do.
func undo(_ connection: inout Connection) throws {
    while try Reinstatement.undo(within: .seconds(5), on: &connection, while: { true }) {}
}

extension Drain {
    /// Runs one pass without interruption.
    mutating func onePass(on connection: inout Connection) throws -> Pass {
        try pass(on: &connection, report: { _ in }, betweenBatches: { _, _, _ in true })
    }
}

extension GuardLimits {
    /// Limits that hold nothing.
    static let off = GuardLimits(allowance: 0, maxShare: .percent(100))
}

extension TestDatabase {
    /// Undoes a window of the topic `t` completely, and returns how many tokens are sendable again.
    func reinstate(_ since: String, _ until: String, cause: String) throws -> String {
        try psql(
            "SELECT tokenkeeper.reinstate('t', 'production', '\(since)', '\(until)', '\(cause)')", user: "a_operator")
        var daemon = try connect(user: "a_daemon")
        try undo(&daemon)
        return try psql("SELECT tokens FROM tokenkeeper.reinstatement ORDER BY exclusion_id DESC LIMIT 1")
    }
}

extension Connection {
    /// How many index entries and rows of a table this transaction has read, except rows by `ctid`.
    mutating func rowsRead(of table: String) throws -> Int {
        let read = try scalar(
            """
            SELECT sum(pg_stat_get_xact_tuples_fetched(i.indexrelid) + pg_stat_get_xact_tuples_returned(i.indexrelid))
                   + pg_stat_get_xact_tuples_returned('tokenkeeper.\(table)'::regclass)
            FROM pg_index AS i WHERE i.indrelid = 'tokenkeeper.\(table)'::regclass
            """)
        guard let read, let rows = Int(read) else { throw TestFailure("no statistics of \(table)") }
        return rows
    }

    /// What an undo must restore: the rows of the ledger.
    mutating func ledger() throws -> [String] {
        try lines(
            """
            SELECT topic_id, encode(token_key, 'hex'), registered_at, stale_at, stale_reason, suspect_at, suspect_reason, unregistered_by_app_at,
                   superseded_at, since, device_id
            FROM tokenkeeper.ledger LEFT JOIN tokenkeeper.suppression USING (topic_id, token_key) ORDER BY topic_id, token_key
            """, columns: 11)
    }
}
