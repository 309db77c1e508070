internal import TokenModel

/// Who has locked our tables.
public enum LockCheck {
    /// Looks twice: a lock that is still there after the pause is not a migration or a `TRUNCATE` that is about to end.
    ///
    /// - Parameter pause: Called between the looks.
    public static func findings(
        on connection: inout Connection, pause: () -> Void
    ) throws(DatabaseError) -> [Finding] {
        var holders = try LockHolder.all(on: &connection).filter(\.isOfWholeTable)
        if !holders.isEmpty {
            pause()
            let first = Set(holders.map(\.identity))
            holders = try LockHolder.all(on: &connection).filter { $0.isOfWholeTable && first.contains($0.identity) }
        }
        return DatabaseCheck.problems(
            holders.map { holder in
                Finding(
                    .problem, "locks", holder.words,
                    fixedBy: [
                        holder.pid.map { "SELECT pg_terminate_backend(\($0));" }
                            ?? "SELECT gid, owner, prepared FROM pg_prepared_xacts WHERE database = current_database();"
                    ])
            }, "locks", elseFine: "nobody has locked a table of ours")
    }
}
