/// Whom the schema is to belong to.
///
/// Its functions are SECURITY DEFINER: they have the owner's rights, so the owner should have no others than it needs.
public enum SchemaOwner {
    /// Does everything from now on as that role, of which the session's role must be a member.
    ///
    /// Session state: use it on a connection of one's own, which is closed afterwards.
    public static func assume(_ role: String, on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query("SELECT set_config('role', $1, false)", [.text(role)])
        // `none` is SQL's word for the role that one came with.
        guard try whom(&connection).role == role else {
            throw DatabaseError(sqlState: nil, message: "\(role) is no role to work as")
        }
    }

    /// Where, and as whom, this session works; of a superuser's functions, callers have all rights there are.
    public static func whom(
        _ connection: inout Connection
    ) throws(DatabaseError) -> (database: String, role: String, isSuperuser: Bool) {
        try connection.query(
            "SELECT current_database()::text, rolname::text, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
        ).one { row throws(DatabaseError) in
            (database: try row.read(), role: try row.read(), isSuperuser: try row.read())
        }
    }
}
