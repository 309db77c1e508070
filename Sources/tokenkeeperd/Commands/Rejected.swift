internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Lists, requeues or discards the results that could not be understood.
struct Rejected: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "List, requeue or discard the results that could not be understood.",
        discussion: """
            The table tokenkeeper.rejected_result keeps them whole for sweep.rejected_retention. Fix them there with UPDATE.
            """,
        subcommands: [List.self, Requeue.self, Discard.self], defaultSubcommand: List.self)

    /// Which results.
    struct Choice: ParsableArguments {
        @Argument(help: "rejected_id values.")
        var ids: [Int64] = []

        @Option(help: "Results whose error, as shown by `rejected list`, begins with this text.")
        var error: String?

        @Flag(help: "All rejected results.")
        var all = false

        func validate() throws {
            guard (ids.isEmpty ? 0 : 1) + (error == nil ? 0 : 1) + (all ? 1 : 0) == 1, error != "" else {
                throw ValidationError("expected rejected_id values, --error TEXT or --all")
            }
        }

        var choice: RejectedResults.Choice {
            if let error { .error(error) } else if all { .all } else { .ids(ids) }
        }
    }

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "List what was rejected, by kind of error.")

        @OptionGroup var options: ConfigurationOptions

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
                let groups = try RejectedResults.groups(on: &connection)
                print(groups.isEmpty ? "nothing is rejected" : groups.map(Self.text).joined(separator: "\n"))
            }
        }

        static func text(_ group: RejectedResults.Group) -> String {
            let attempts = group.attempts > 0 ? "; requeued up to \(counted(group.attempts, "time", "times"))" : ""
            return """
                \(group.results)  \(HistoryText.plain(group.error))
                   \(group.first) to \(group.last)\(attempts); such as \(group.samples)
                """
        }
    }

    struct Requeue: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Put results back into the queue, with the time at which they were first queued.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Choice

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try RejectedResults.requeue(which.choice, on: &connection)
                print("\(counted(results, "result is", "results are")) back in the queue")
            }
        }
    }

    struct Discard: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "Delete results.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Choice

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try RejectedResults.discard(which.choice, on: &connection)
                print("\(counted(results, "result is", "results are")) deleted")
            }
        }
    }
}
