internal import ArgumentParser
internal import TokenLedger

/// Lets an administrator work for the schema's owner, which then needs no login of its own.
struct OwnerOption: ParsableArguments {
    @Option(help: "Work as this role (SET ROLE), to which the schema belongs or is to belong.")
    var owner: String?

    func assume(on connection: inout Connection) throws(DatabaseError) {
        if let owner { try SchemaOwner.assume(owner, on: &connection) }
    }
}
