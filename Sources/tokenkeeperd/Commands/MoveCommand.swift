internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Moves a topic, or a bucket of topics, to another database.
struct MoveCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "move",
        abstract: "Move a topic, or a bucket of topics, to another database of the map.",
        discussion: """
            Run it three times. The first run copies all tokens. Then change the map on every host, and run it again: \
            the old database names the new one to its callers, and the tokens are copied once more, with their \
            history. When nothing more arrives, --end deletes them from the old database. Repeat an interrupted run. \
            Needs the rights of tokenkeeper_operator in both databases. A topic with an attached table cannot move.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Argument(help: "A topic, or the number of a bucket.")
    var what: String

    @Option(help: "The new database, by its name in the map.")
    var to: String

    @Option(help: "The old database. [default: that of the map, or of the move that has begun]")
    var from: String?

    @Flag(help: "End the move: delete the tokens from the old database.")
    var end = false

    func run() throws {
        let stop = ShutdownRequest.bySignal()
        let configuration = try options.read()
        let map = try TopicMap(of: configuration)
        do {
            var target = try configuration.connect(to: to, of: map)
            let topics = try topics(map, configuration, &target)
            if topics.isEmpty { throw ConfigurationError(["there is no topic to move"]) }
            for (topic, name) in topics {
                var source = try configuration.connect(to: name, of: map)
                if try TopicMove.areOne(&source, &target) {
                    throw ConfigurationError(["\(name) and \(to) are the same database"])
                }
                let run = MoveRun(TopicMove(topic, from: name, to: to), bucket: Int(what), map, stop.request)
                let words = try end ? run.end(&source, &target) : run.advance(&source, &target)
                print(HistoryText.plain(words))
            }
        } catch let error as DatabaseError {
            ConfigurationOptions.complain(error.description)
            if error.sqlState == "42501" {
                ConfigurationOptions.complain("this needs the rights of tokenkeeper_operator in both databases")
            }
            throw ExitCode(ExitStatus(error).rawValue)
        } catch let error as SchemaError {
            ConfigurationOptions.complain(error.description)
            throw ExitCode(ExitStatus.configuration.rawValue)
        }
        withExtendedLifetime(stop) {}
    }

    /// The topics to move, each with its database.
    private func topics(
        _ map: TopicMap, _ configuration: Configuration, _ target: inout Connection
    ) throws -> [(topic: String, source: String)] {
        let bucket = Int(what)
        if let bucket, !(0..<TopicMap.buckets).contains(bucket) {
            throw ConfigurationError(["bucket \(bucket): expected 0 to \(TopicMap.buckets - 1)"])
        }
        let split = map.splitByDevice.sorted()
        if bucket == nil ? split.contains(what) : !split.isEmpty {
            throw ConfigurationError(["\(split.joined(separator: ", ")): a topic that is split by device cannot move"])
        }
        let isMeant = { (topic: String) in
            bucket.map { map.topics[topic] == nil && TopicMap.bucket(of: topic) == $0 } ?? (topic == what)
        }
        let arriving = try TopicMove.arriving(on: &target).filter {
            isMeant($0.topic) && $0.source == from ?? $0.source
        }
        let owner = bucket.map { map.owners[$0] } ?? map.holders(of: what).first ?? to
        let source = from ?? (owner == to ? nil : owner)
        guard bucket != nil else {
            if let source, source != to { return [(what, source)] }
            if !arriving.isEmpty { return arriving }
            throw ConfigurationError(["the map leads to \(to) already: name the database in which it is with --from"])
        }
        // Also those that are new in the source since the first run.
        var found = arriving
        for name in Set(arriving.map(\.source) + [source].compactMap(\.self)).sorted() where name != to {
            var connection = try configuration.connect(to: name, of: map)
            let known = try end ? [] : KnownTopics.all(on: &connection).filter(isMeant)
            found += known.filter { topic in !arriving.contains { $0.topic == topic } }.map { ($0, name) }
        }
        return found
    }
}

extension Configuration {
    /// Connects to a database of the map, as to the one of the configuration, and checks its schema.
    func connect(to name: String, of map: TopicMap) throws -> Connection {
        guard let text = map.databases[name] else {
            throw ConfigurationError([
                "the map has no database \(ConfigurationProblems.quoted(name)), but "
                    + map.names.joined(separator: ", ")
            ])
        }
        let address: DatabaseAddress
        do { address = try DatabaseAddress(text) } catch { throw ConfigurationError(["database \(name): \(error)"]) }
        var connection = try Connection(to: address)
        try Migrator(daemon: Daemon.version).check(&connection)
        return connection
    }
}
