internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Erases a token, a device or a user.
struct Forget: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Erase a token, a device or a user: a person's right to erasure.",
        discussion: """
            Deletes at once what is stored, in every topic and environment. A running daemon deletes what is queued. \
            Needs the rights of tokenkeeper_app or tokenkeeper_operator. With --all, in all databases of the map. This \
            cannot be undone; --dry-run counts first.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Option(help: "A device token.")
    var token: String?

    @Option(help: "A device (device_id), with all its tokens.")
    var device: String?

    @Option(help: "A user (user_id), with all its tokens.")
    var user: String?

    @Flag(help: "Only count.")
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
            let rows = try Erasure(subject).perform(dryRun: dryRun, on: &connection)
            print(
                dryRun
                    ? "\(counted(rows, "row", "rows")) would be deleted"
                    : "\(counted(rows, "row was", "rows were")) deleted; a running daemon drops what is queued")
        }
    }
}
