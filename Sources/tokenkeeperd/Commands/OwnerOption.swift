internal import ArgumentParser
internal import TokenLedger

/// Lets an administrator work for the schema's owner, which then needs no login of its own.
struct OwnerOption: ParsableArguments {
    @Option(help: "Work as this role (SET ROLE), to which the schema belongs or is to belong.")
    var owner: String?

    /// Works as the owner from here on, and says where and as whom.
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
