/// Whom the schema is to belong to.
///
/// Its functions are SECURITY DEFINER: they have the owner's rights, so give the owner only the rights that it needs.
public enum SchemaOwner {
    /// An expression: the role that the schema's tables belong to; if it has none yet, the role that the schema itself belongs to; null if
    /// there is no schema.
    static let sql = """
        coalesce(
            (SELECT t.tableowner FROM pg_catalog.pg_tables AS t WHERE t.schemaname = 'tokenkeeper' AND t.tablename = 'migration'),
            (SELECT pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper'))
        """

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

    /// What became of an owner's right to create roles.
    public enum RoleCreation: Equatable, Sendable {
        /// It has none.
        case none
        case taken
        /// The session's role may not take it: an administrator should run this statement.
        case kept(fix: String)
    }

    /// Returns to the session's own role and takes CREATEROLE from the owner. The owner does not need it once the roles exist, and somebody who
    /// subverts one of its functions could use it.
    public static func takeRoleCreation(
        from owner: String, on connection: inout Connection
    ) throws(DatabaseError) -> RoleCreation {
        _ = try connection.query("SELECT set_config('role', 'none', false)")
        guard let fix = try roleCreationFix(of: owner, on: &connection) else { return .none }
        // Never from the login itself: it may be the only administrator of a managed server.
        let isOwn: Bool = try connection.query("SELECT session_user = $1", [.text(owner)]).value()
        if isOwn { return .kept(fix: fix) }
        do {
            try connection.run(fix)
            return .taken
        } catch let error where error.sqlState == "42501" {
            return .kept(fix: fix)
        }
    }

    /// - Returns: The statement that takes CREATEROLE from a role; nil if it has none, or is a superuser.
    private static func roleCreationFix(
        of role: String, on connection: inout Connection
    ) throws(DatabaseError) -> String? {
        try connection.query(
            """
            SELECT format('ALTER ROLE %I NOCREATEROLE;', rolname) FROM pg_catalog.pg_roles
            WHERE rolname = $1 AND rolcreaterole AND NOT rolsuper
            """, [.text(role)]
        ).first { row throws(DatabaseError) in try row.read() }
    }

    /// As whom this session works; of a superuser's functions, callers have all rights there are.
    public static func whom(
        _ connection: inout Connection
    ) throws(DatabaseError) -> (role: String, isSuperuser: Bool) {
        try connection.query(
            "SELECT rolname::text, rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user"
        ).one { row throws(DatabaseError) in
            (role: try row.read(), isSuperuser: try row.read())
        }
    }

    /// Refuses to let another role than the owner migrate: every new function would belong to that role, with its rights, and the owner
    /// could not replace it later.
    static func check(on connection: inout Connection) throws {
        let (owner, role) = try connection.query("SELECT (\(sql))::text, current_user::text").one {
            row throws(DatabaseError) in (try row.read(String?.self), try row.read(String.self))
        }
        if let owner, owner != role { throw SchemaError.notOwner(owner: owner, role: role) }
    }
}
