internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Erases a token, a device or a user.
struct Forget: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Erase a token, a device or a user: a person's right to erasure.",
        discussion: """
            Deletes at once what is stored in the ledger, the history, campaigns, and held and rejected rows, in every topic and \
            environment. A running daemon does the rest: what is queued. Needs the rights of tokenkeeper_app or tokenkeeper_operator. \
            With --all, in all databases of the map. This cannot be undone; --dry-run counts first.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Option(help: "A device token.")
    var token: String?

    @Option(help: "A device, by the device_id given to register, with all its tokens.")
    var device: String?

    @Option(help: "A user, by the user_id given to register, with all tokens of the user.")
    var user: String?

    @Flag(help: "Count only, and change nothing.")
    var dryRun = false

    func validate() throws {
        if [token, device, user].compactMap(\.self).count != 1 {
            throw ValidationError("expected one of --token, --device and --user")
        }
    }

    func run() throws {
        Signals.unblock()
        let subject: Erasure.Subject =
            if let token { .token(token) } else if let device { .device(device) } else { .user(user ?? "") }
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            do {
                let rows = try Erasure(subject).perform(dryRun: dryRun, on: &connection)
                print(
                    dryRun
                        ? "\(counted(rows, "row", "rows")) would be deleted"
                        : "\(counted(rows, "row was", "rows were")) deleted; a running daemon drops what is queued")
            } catch let error as DatabaseError where error.sqlState == "22023" {
                ConfigurationOptions.complain(error.message)
                throw ExitCode(ExitStatus.usage.rawValue)
            }
        }
    }
}
