internal import ArgumentParser
internal import TokenLedger

/// Lets an administrator act as the schema's owner, so that the owner needs no login.
struct OwnerOption: ParsableArguments {
    @Option(help: "Act as this role (SET ROLE), which owns or will own the schema.")
    var owner: String?

    /// Acts as the owner from now on, and prints the database and the role.
    func assume(on connection: inout Connection) throws(DatabaseError) {
        if let owner { try SchemaOwner.assume(owner, on: &connection) }
        let whom = try SchemaOwner.whom(&connection)
        print("database \(whom.database), as \(whom.role)")
        if whom.isSuperuser {
            ConfigurationOptions.complain(
                "warning: this role is a superuser and owns what it creates, and the schema's functions run with their owner's rights: name another role with --owner"
            )
        }
    }
}
