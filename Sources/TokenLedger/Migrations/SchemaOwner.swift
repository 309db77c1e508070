/// Whom the schema is to belong to.
///
/// Its functions are SECURITY DEFINER: they have the owner's rights, so the owner should have no others than it needs.
public enum SchemaOwner {
    /// Does everything from now on as that role, of which the session's role must be a member.
    ///
    /// Session state: use it on a connection of one's own, which is closed afterwards.
    public static func assume(_ role: String, on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query("SELECT set_config('role', $1, false)", [.text(role)])
    }

    /// Whether what is created now would have all rights there are.
    public static func isSuperuser(_ connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query("SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user").bool(0, 0) == true
    }
}
