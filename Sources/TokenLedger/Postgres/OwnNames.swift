internal import CLibPQ

/// Every name in a statement of ours is one of PostgreSQL's, or one of ours with its schema.
///
/// Otherwise a login that may create in a schema of the path could have its code executed with our rights: an exact match of the argument
/// types in `public` beats `cardinality(anyarray)` in `pg_catalog`. So no statement runs outside a transaction, and the first statement of
/// each is this. It is not a setting of the session: behind a transaction pooler that would leak into other applications.
enum OwnNames {
    /// And without jit: with sequential scans off, each cost looks immense to PostgreSQL, and it would compile what takes a millisecond.
    static let setting = "SET LOCAL search_path = pg_catalog, pg_temp;\nSET LOCAL jit = off;"

    /// A script that is sent outside a transaction, with the setting as the first statement of the transaction that it opens or is.
    ///
    /// A BEGIN after the setting belongs to the same transaction, so the setting holds until its end.
    static func first(in script: String) -> String {
        let rest = script.hasPrefix("BEGIN ") ? script.drop { $0 != "\n" }.dropFirst() : script[...]
        return rest.hasPrefix(setting) ? script : "\(setting)\n\(script)"
    }
}

extension Connection {
    /// Whether what is sent now would be looked up in whatever path the login has.
    var mustSetPath: Bool { unsafe ownNamesOnly && PQtransactionStatus(handle) == PQTRANS_IDLE }

    /// Runs a statement that has come without a transaction.
    mutating func inOwnTransaction(
        _ work: (inout Connection) throws(DatabaseError) -> Rows
    ) throws(DatabaseError) -> Rows {
        do {
            try run("BEGIN")
            let rows = try work(&self)
            try commit()
            return rows
        } catch {
            rollback()
            throw error
        }
    }
}
