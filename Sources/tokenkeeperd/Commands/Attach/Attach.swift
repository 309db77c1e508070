internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Attaches a table of the provider.
struct Attach: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Attach a table of device tokens: its changes reach the ledger by themselves.",
        discussion: """
            Creates triggers that queue registrations and logouts. Options are SQL expressions over the columns of a \
            row, such as the name of a column. Run it as the table's owner, who must be a member of tokenkeeper_app: \
            it refuses a superuser, and a login with roles of tokenkeeperd that the owner lacks. Begin with --dry-run.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    @Option(help: "The device token: text or bytea.")
    var token: String

    @Option(help: "The topic; a constant for all rows: \"'com.example.app'\".")
    var topic: String

    @Option(help: "Which rows count, such as \"platform = 'ios'\". [default: all]")
    var filter: String?

    @Option(help: "production or sandbox. [default: 'production']")
    var environment: String?

    @Option(help: "When the device last registered: a timestamptz that nothing else changes.")
    var registeredAt: String?

    @Option(help: "The device's identifier.")
    var deviceID: String?

    @Option(help: "The user's identifier.")
    var userID: String?

    @Option(help: "The tags: text[] or a JSON array.")
    var tags: String?

    @Option(help: "True for a row that wants no pushes, as in 'logged_out_at IS NOT NULL'.")
    var loggedOut: String?

    @Option(help: "Whether a deleted row is a logout: ignore or unregister. [default: ignore]")
    var onDelete: String?

    @Option(help: "The attachment's name; a table's second one needs it. [default: the table's]")
    var name: String?

    @Flag(help: "Also queue what logical replication applies to the table.")
    var always = false

    @Flag(help: "Only show what the expressions give for five rows, and what is wrong.")
    var dryRun = false

    @Flag(help: "Then queue the existing rows, as `backfill` does.")
    var backfill = false

    @Flag(help: "Also show the generated functions and triggers.")
    var verbose = false

    func validate() throws {
        if dryRun && backfill { throw ValidationError("--dry-run and --backfill exclude each other") }
    }

    func run() throws {
        let stop = ShutdownRequest.bySignal()
        try table.run(options.load()) { connection in
            let attachment = Attachment(
                table: table.table, arguments: arguments, isAlways: always, isVerbose: verbose)
            let plan = try attachment.perform(isDryRun: true, on: &connection)
            for finding in plan where finding.kind == .warning {
                ConfigurationOptions.complain("warning: \(HistoryText.plain(finding.detail))")
            }
            let errors = plan.filter { $0.kind == .error }
            for finding in errors { ConfigurationOptions.complain(HistoryText.plain(finding.detail)) }
            if !errors.isEmpty { throw ExitCode(ExitStatus.usage.rawValue) }
            if dryRun {
                for finding in plan where finding.kind == .row { print(HistoryText.plain(finding.detail)) }
                if verbose { for finding in plan where finding.kind == .sql { print(finding.detail + ";") } }
                return
            }
            for finding in try attachment.perform(isDryRun: false, on: &connection) where finding.kind == .attached {
                print(HistoryText.plain(finding.detail))
            }
            if backfill {
                try BackfillRun(stop: stop.request).perform(on: name ?? table.table, &connection)
            } else {
                print("to queue the rows that are there: \(BackfillRun.command(name ?? table.table))")
            }
        }
        withExtendedLifetime(stop) {}
    }

    private var arguments: [(name: String, value: String)] {
        let all: [(String, String?)] = [
            ("token", token), ("topic", topic), ("filter", filter), ("environment", environment),
            ("registered_at", registeredAt), ("device_id", deviceID), ("user_id", userID), ("tags", tags),
            ("logged_out", loggedOut), ("on_delete", onDelete), ("name", name),
        ]
        return all.compactMap { name, value in value.map { (name, $0) } }
    }
}

/// Detaches a table.
struct Detach: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Detach a table: drop the triggers and functions of `attach`.",
        discussion: """
            The ledger keeps what it knows, and what is queued is applied. Run it as the table's owner. For a dropped \
            table, give its former name.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    func run() throws {
        Signals.unblock()
        try table.run(options.load()) { connection in
            try Attachment.detach(table.table, on: &connection)
            print("\(HistoryText.plain(table.table)) is detached")
        }
    }
}

/// Lists the attached tables.
struct ListAttachments: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "attachments", abstract: "List the attached tables, and whether their changes arrive.",
        discussion: "Needs the rights of tokenkeeper_reader or tokenkeeper_app.")

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print the view tokenkeeper.attachment as JSON.")
    var json = false

    func run() throws {
        Signals.unblock()
        try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
            if json { return print(try Attachment.json(on: &connection)) }
            let tables = try Attachment.all(on: &connection)
            print(tables.isEmpty ? "no table is attached" : tables.map(Self.text).joined(separator: "\n"))
        }
    }

    static func text(_ table: Attachment.Row) -> String {
        var words =
            "\(table.name)\(table.name == table.table ? "" : " of \(table.table)")  attached at \(table.attachedAt) as source \(table.sourceID), triggers \(table.triggers)"
        if let fault = table.fault { words += "; broken: \(fault)" }
        if table.failures > 0 {
            words +=
                "; \(counted(table.failures, "change", "changes")) could not be queued: \(table.failure ?? "no message")"
        }
        switch (table.checkedAt, table.differences) {
        case (let checked?, 0): words += "; checked at \(checked): agrees"
        case (let checked?, let differences?): words += "; checked at \(checked): differs in \(differences)"
        default: words += "; never checked"
        }
        return HistoryText.plain(words)
    }
}
