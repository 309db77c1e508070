internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Queues the rows that an attached table already has.
struct BackfillTable: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "backfill",
        abstract: "Queue the rows that an attached table already has, as registrations.",
        discussion: """
            Reads the table in batches, by its key. Ctrl-C, a kill or a lost connection does no harm: run it again, and it continues where \
            it stopped; each row is queued exactly once. Logged-out rows arrive as logged out, rows with stale_at as stale. Refused rows are \
            kept in tokenkeeper.rejected_registration, with their key and the cause. It waits while many registrations are queued, so a \
            daemon must be running. To undo it, run `tokenkeeperd withdraw`. Run it as the table's owner: it refuses a superuser, and a login \
            with roles of tokenkeeperd that the owner lacks.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    func run() throws {
        let stop = ShutdownRequest.bySignal()
        try table.run(options.load()) { name, connection in
            try BackfillRun(stop: stop.request).perform(on: name, &connection)
        }
        withExtendedLifetime(stop) {}
    }
}
