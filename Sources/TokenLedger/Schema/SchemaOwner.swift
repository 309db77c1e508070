/// Whom the schema is to belong to.
///
/// Its functions are SECURITY DEFINER: they have the owner's rights, so the owner should have no others than it needs.
public enum SchemaOwner {
    /// Does everything from now on as that role, of which the session's role must be a member.
    ///
    /// Session state: use it on a connection of one's own, which is closed afterwards.
    public static func assume(_ role: String, on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query("SELECT set_config('role', $1, false)", [.text(role)])
        // The name `none` would return to the session's own role instead.
        guard try whom(&connection).role == role else {
            throw DatabaseError(sqlState: nil, message: "cannot SET ROLE to \(role)")
        }
    }

    /// Where, and as whom, this session works; of a superuser's functions, callers have all rights there are.
    public static func whom(
        _ connection: inout Connection
    ) throws(DatabaseError) -> (database: String, role: String, isSuperuser: Bool) {
        let row = try connection.query(
            "SELECT current_database()::text, rolname::text, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
        )
        return (row.text(0, 0) ?? "", row.text(0, 1) ?? "", row.bool(0, 2) == true)
    }
}
