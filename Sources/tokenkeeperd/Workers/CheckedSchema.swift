internal import TokenLedger

/// The schema as it was when this daemon found that it fits.
struct CheckedSchema {
    /// See `Migrator.fingerprint`.
    let fingerprint: String?

    /// Whether a statement was refused because a function is missing (42883) that is none of ours: perhaps a trigger on one of our tables
    /// calls it. Then a person must act. If the schema has been migrated since, a new connection checks it instead.
    func isMissingFunction(_ error: DatabaseError, on connection: inout Connection) -> Bool {
        error.sqlState == "42883" && (try? Migrator.fingerprint(&connection)) == fingerprint
    }
}
