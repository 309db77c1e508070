internal import ArgumentParser

struct ShowMap: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "map",
        abstract: "Check the map of databases, or print which database has a topic.",
        discussion: """
            Reads the file that map.file names, and connects to nothing. Without a topic, prints each database with \
            its buckets and topics.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Argument(help: "A topic.")
    var topic: String?

    @Option(name: .customLong("device"), help: "The device, for a topic that is split by device.")
    var device: String?

    @Flag(help: "Without a topic: print JSON.")
    var json = false

    func validate() throws {
        if json, topic != nil { throw ValidationError("--json lists the databases: leave out the topic.") }
        if device != nil, topic == nil { throw ValidationError("--device is of a topic: name it, too.") }
    }

    func run() throws {
        let map = try TopicMap(of: try options.read())
        guard let topic else {
            return print(json ? try JSONOutput.array(map.names.map { Row($0, of: map) }) : Self.text(map))
        }
        switch map.database(of: topic, device: device) {
        case .to(let name): print(name)
        case .byDevice:
            ConfigurationOptions.complain("\(topic) is split by device: name one with --device")
            throw ExitCode(ExitStatus.usage.rawValue)
        }
    }

    /// A database of the map.
    private struct Row: Encodable {
        let database: String
        let buckets: Int
        /// Those that the map leads to it by name.
        let topics: [String]
        /// Those of which it has some devices.
        let splitByDevice: [String]

        init(_ name: String, of map: TopicMap) {
            database = name
            buckets = map.owners.count { $0 == name }
            topics = map.topics.filter { $0.value == name }.keys.sorted()
            splitByDevice = map.splitByDevice.sorted()
        }
    }

    private static func text(_ map: TopicMap) -> String {
        var lines = map.names.map { Row($0, of: map) }.map { row in
            "\(row.database)  \(row.buckets) of \(TopicMap.buckets) buckets"
                + (row.topics.isEmpty ? "" : ", and " + row.topics.joined(separator: ", "))
        }
        if !map.splitByDevice.isEmpty {
            lines.append("split by device: " + map.splitByDevice.sorted().joined(separator: ", "))
        }
        return lines.joined(separator: "\n")
    }
}
