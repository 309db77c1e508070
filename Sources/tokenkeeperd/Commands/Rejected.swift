internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Lists, requeues or discards the results and registrations that could not be understood.
struct Rejected: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "List, requeue or discard results and registrations that could not be understood.",
        discussion: """
            tokenkeeper.rejected_result and tokenkeeper.rejected_registration keep them whole for \
            sweep.rejected_retention. Fix them there with UPDATE.
            """,
        subcommands: [List.self, Requeue.self, Discard.self], defaultSubcommand: List.self)

    /// Which rows.
    struct Choice: ParsableArguments {
        @Argument(help: "rejected_id values.")
        var ids: [Int64] = []

        @Option(help: "Those whose error in `rejected list` begins with this text.")
        var error: String?

        @Flag(help: "All of them.")
        var all = false

        @Flag(help: "Registrations instead of results.")
        var registrations = false

        func validate() throws {
            guard (ids.isEmpty ? 0 : 1) + (error == nil ? 0 : 1) + (all ? 1 : 0) == 1, error != "" else {
                throw ValidationError("expected rejected_id values, --error TEXT or --all")
            }
        }

        var rows: RejectedRows { RejectedRows(registrations ? .registrations : .results) }

        /// How many rows, in words.
        func counted(_ number: Int64) -> String {
            registrations
                ? TokenModel.counted(number, "registration is", "registrations are")
                : TokenModel.counted(number, "result is", "results are")
        }

        var choice: RejectedRows.Choice {
            if let error { .error(error) } else if all { .all } else { .ids(ids) }
        }
    }

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "List what was rejected, by kind of error.")

        @OptionGroup var options: ConfigurationOptions

        @Flag(help: "Print JSON.")
        var json = false

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
                let results = try RejectedRows(.results).groups(on: &connection)
                let registrations = try RejectedRows(.registrations).groups(on: &connection)
                if json {
                    let rows =
                        results.map { Row($0, of: "results") } + registrations.map { Row($0, of: "registrations") }
                    return print(try JSONOutput.array(rows))
                }
                let heading = registrations.isEmpty ? [] : ["registrations, for --registrations:"]
                let lines = results.map(Self.text) + heading + registrations.map(Self.text)
                print(lines.isEmpty ? "nothing is rejected" : lines.joined(separator: "\n"))
            }
        }

        private struct Row: Encodable {
            /// results or registrations.
            let queue, error: String
            let rows: Int64
            let firstRejectedAt, lastRejectedAt: String
            let attempts: Int64
            /// Up to five rejected_id values.
            let samples: [Int64]
            let latest: String

            init(_ group: RejectedRows.Group, of queue: String) {
                (self.queue, error, rows, attempts) = (queue, group.error, group.rows, group.attempts)
                firstRejectedAt = JSONOutput.instant(group.first)
                lastRejectedAt = JSONOutput.instant(group.last)
                samples = group.samples.split(separator: " ").compactMap { Int64($0) }
                latest = group.latest
            }
        }

        static func text(_ group: RejectedRows.Group) -> String {
            let attempts = group.attempts > 0 ? "; requeued up to \(counted(group.attempts, "time", "times"))" : ""
            return """
                \(group.rows)  \(HistoryText.plain(group.error))
                   \(group.first) to \(group.last)\(attempts); such as \(group.samples)
                   \(HistoryText.plain(group.latest))
                """
        }
    }

    struct Requeue: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Put results or registrations back into their queue.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Choice

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                print(
                    "\(which.counted(try which.rows.requeue(which.choice, on: &connection))) back in the queue")
            }
        }
    }

    struct Discard: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "Delete results or registrations.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Choice

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                print("\(which.counted(try which.rows.discard(which.choice, on: &connection))) deleted")
            }
        }
    }
}
