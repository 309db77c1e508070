internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// What a command prints: at once for one database, and for the shards of a router at the end, with their numbers.
struct ShardOutput {
    /// The number of the shard; nil for a database that was named itself.
    let shard: Int?
    fileprivate(set) var lines: [String] = []

    fileprivate init(_ shard: Int?) {
        self.shard = shard
    }

    mutating func print(_ text: String) {
        if shard == nil { Swift.print(text) } else { lines.append(text) }
    }

    /// Writes to standard error.
    func complain(_ problem: String) {
        ConfigurationOptions.complain((shard.map { "shard \($0): " } ?? "") + problem)
    }

    /// What several shards have said: each text once, with the numbers of the shards that have said it.
    static func text(_ said: [(shard: Int, text: String)]) -> String {
        let groups = grouped(said.filter { !$0.text.isEmpty }.map { ($0.shard, $0.text) })
        let hasBlocks = groups.contains { $0.value.contains("\n") }
        return groups.map { "\(numbered($0.shards)):\(hasBlocks ? "\n" : " ")\($0.value)" }
            .joined(separator: hasBlocks ? "\n\n" : "\n")
    }

    /// Each value once, in the order in which they came first, with the numbers of its shards.
    static func grouped<Value: Equatable>(_ said: [(shard: Int, value: Value)]) -> [(shards: [Int], value: Value)] {
        var groups: [(shards: [Int], value: Value)] = []
        for (shard, value) in said {
            if let index = groups.firstIndex(where: { $0.value == value }) {
                groups[index].shards.append(shard)
            } else {
                groups.append(([shard], value))
            }
        }
        return groups
    }

    /// `shard 3`, or `shards 0, 1, 2`.
    static func numbered(_ shards: [Int]) -> String {
        (shards.count == 1 ? "shard " : "shards ") + shards.map(String.init).joined(separator: ", ")
    }
}

extension Configuration {
    /// For a command that needs a schema that fits this daemon, and that does its work on each shard if the database is a router. A
    /// shard that does not answer is named, and the others have their turn; then the command exits with an error.
    ///
    /// - Parameters:
    ///   - writes: Whether the primary is needed.
    ///   - role: The group role whose rights the command needs.
    ///   - refusal: Why the command cannot do its work on several shards; nil if it can.
    func withEachLedger(
        writes: Bool = true, as role: String, refusingRouter refusal: String? = nil,
        _ work: (inout Connection, inout ShardOutput) throws -> Void
    ) throws {
        var routed: RoutedShards?
        try withConnection(writes: writes, as: role) { connection in
            routed = try RoutedShards(of: &connection, at: address)
            if routed != nil { return }
            try Migrator(daemon: Daemon.version).check(&connection)
            var output = ShardOutput(nil)
            try work(&connection, &output)
        }
        guard let routed else { return }
        if let refusal {
            ConfigurationOptions.complain("this database is a router: \(refusal)")
            throw ExitCode(ExitStatus.usage.rawValue)
        }
        try onEach(of: routed, writes: writes, as: role) { connection, output in try work(&connection, &output) }
    }

    private func onEach(
        of routed: RoutedShards, writes: Bool, as role: String,
        _ work: (inout Connection, inout ShardOutput) throws -> Void
    ) throws {
        var said: [(shard: Int, text: String)] = []
        var failure: ExitCode?
        var (refusal, isDone) = (DatabaseError?.none, false)
        for number in routed.numbers {
            var output = ShardOutput(number)
            do {
                try withShard(number, of: routed, writes: writes, as: role) { connection in
                    do {
                        try work(&connection, &output)
                        isDone = true
                    } catch let error as DatabaseError where error.sqlState?.hasPrefix("22") == true {
                        refusal = error
                    }
                }
            } catch let code as ExitCode {
                // A shard that does not answer counts most.
                if failure == nil || code.rawValue == ExitStatus.unavailable.rawValue { failure = code }
            }
            said.append((number, output.lines.joined(separator: "\n")))
        }
        let text = ShardOutput.text(said)
        if !text.isEmpty { print(text) }
        if let failure { throw failure }
        // If one shard accepts the arguments, they are valid: a shard that refuses them does not know the topic, and has nothing to do.
        if let refusal, !isDone {
            ConfigurationOptions.complain(refusal.description)
            throw ExitCode(ExitStatus.unavailable.rawValue)
        }
    }

    /// Connects to a shard, and checks its schema.
    ///
    /// - Throws: `ExitCode`, after the error was printed with the number of the shard.
    func withShard(
        _ number: Int, of routed: RoutedShards, writes: Bool, as role: String,
        _ work: (inout Connection) throws -> Void
    ) throws {
        let problem: String
        do {
            var connection = try connectLikeService(to: try routed.address(of: number), writes: writes)
            try Migrator(daemon: Daemon.version).check(&connection)
            return try work(&connection)
        } catch let code as ExitCode {
            throw code
        } catch let error as DatabaseError where error.sqlState == "42501" {
            problem = "\(error); the command needs the rights of \(role) there"
        } catch {
            problem = "\(error)"
        }
        ConfigurationOptions.complain("shard \(number): \(HistoryText.plain(problem))")
        throw ExitCode(ExitStatus.unavailable.rawValue)
    }
}
