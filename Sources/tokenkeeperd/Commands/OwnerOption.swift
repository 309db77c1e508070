internal import ArgumentParser
internal import TokenLedger

/// Lets an administrator work as the schema's owner, a role that then needs no login.
struct OwnerOption: ParsableArguments {
    @Option(help: "Work as this role (SET ROLE), which owns or will own the schema.")
    var owner: String?

    /// Works as the owner from now on, and prints the database and the role.
    func assume(on connection: inout Connection) throws(DatabaseError) {
        if let owner { try SchemaOwner.assume(owner, on: &connection) }
        let whom = try SchemaOwner.whom(&connection)
        print("database \(whom.database), as \(whom.role)")
        if whom.isSuperuser {
            ConfigurationOptions.complain(
                "warning: what a superuser makes belongs to it, and the schema's functions have their owner's rights: better name another role with --owner"
            )
        }
    }
}
