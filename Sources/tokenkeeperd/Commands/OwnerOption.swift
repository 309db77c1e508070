internal import ArgumentParser
internal import TokenLedger

/// Lets an administrator act as the schema's owner, so that the owner needs no login.
struct OwnerOption: ParsableArguments {
    @Option(help: "Act as this role (SET ROLE), which owns or will own the schema.")
    var owner: String?

    /// Creates the roles that are missing as the login, so that the owner needs no right to.
    func createRoles(on connection: inout Connection) throws(DatabaseError) {
        if owner != nil { try Grants.createRoles(on: &connection) }
    }

    /// Takes the right to create roles from the owner. Acts as the login from then on.
    func takeRoleCreation(on connection: inout Connection) throws(DatabaseError) {
        let role = try SchemaOwner.whom(&connection).role
        let name = owner ?? role
        switch try SchemaOwner.takeRoleCreation(from: name, on: &connection) {
        case .none: break
        case .taken: print("took CREATEROLE from \(name)")
        case .kept(let fix):
            ConfigurationOptions.complain(
                "warning: \(name) owns the schema and may create roles, and the schema's functions run with their owner's rights: if it needs that for nothing else, have an administrator run: \(fix)"
            )
        }
    }

    /// Acts as the owner from now on, and prints the database and the role.
    func assume(on connection: inout Connection) throws(DatabaseError) {
        if let owner { try SchemaOwner.assume(owner, on: &connection) }
        let whom = try SchemaOwner.whom(&connection)
        print("\(connection.name), as \(whom.role)")
        if whom.isSuperuser {
            ConfigurationOptions.complain(
                "warning: this role is a superuser and owns what it creates, and the schema's functions run with their owner's rights: name another role with --owner"
            )
        }
    }
}
