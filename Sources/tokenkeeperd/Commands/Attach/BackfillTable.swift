internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Queues the rows that an attached table already has.
struct BackfillTable: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "backfill",
        abstract: "Queue the existing rows of an attached table, as registrations.",
        discussion: """
            Continues where an interrupted run has stopped, and queues each row exactly once. Logged-out rows arrive \
            as logged out. What cannot be understood goes to tokenkeeper.rejected_registration, with the row's key and \
            the cause. It waits while many registrations are queued, so a daemon must be running. To undo it, run \
            `tokenkeeperd withdraw`. Run it as the table's owner; it refuses the same logins as `attach`.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    @Flag(help: "Only compare the table with the ledger; exit with 1 if they differ.")
    var check = false

    @Flag(help: "Compare, and queue what repairs the differences.")
    var `repair` = false

    func validate() throws {
        if check && `repair` { throw ValidationError("--check and --repair exclude each other") }
    }

    func run() throws {
        let stop = ShutdownRequest.bySignal()
        let configuration = try options.load()
        try table.run(configuration) { connection in
            guard check || `repair` else {
                return try BackfillRun(stop: stop.request).perform(on: table.table, &connection)
            }
            try table.run(configuration) { writer in
                try CheckRun(stop: stop.request, repairs: `repair`).perform(on: table.table, &connection, &writer)
            }
        }
        withExtendedLifetime(stop) {}
    }
}
