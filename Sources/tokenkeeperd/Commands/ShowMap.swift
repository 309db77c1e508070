internal import ArgumentParser

struct ShowMap: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "map",
        abstract: "Check the map of databases, or print which database has a topic.",
        discussion: """
            Reads the file that map.file names, and connects to nothing. Without a topic, prints each database with \
            its buckets and topics. Exits with 78 if the map is wrong.
            """)

    @OptionGroup var options: ConfigurationOptions

    @Argument(help: "A topic.")
    var topic: String?

    @Option(name: .customLong("device"), help: "The device, for a topic that is split by device.")
    var device: String?

    func validate() throws {
        if device != nil, topic == nil { throw ValidationError("--device is of a topic: name it, too.") }
    }

    func run() throws {
        let map = try TopicMap(of: try options.read())
        guard let topic else { return print(Self.text(map)) }
        switch map.database(of: topic, device: device) {
        case .to(let name): print(name)
        case .byDevice:
            ConfigurationOptions.complain("\(topic) is split by device: name one with --device")
            throw ExitCode(ExitStatus.usage.rawValue)
        }
    }

    private static func text(_ map: TopicMap) -> String {
        var lines = map.names.map { name in
            let buckets = map.owners.count { $0 == name }
            let topics = map.topics.filter { $0.value == name }.keys.sorted()
            return "\(name)  \(buckets) of \(TopicMap.buckets) buckets"
                + (topics.isEmpty ? "" : ", and " + topics.joined(separator: ", "))
        }
        if !map.splitByDevice.isEmpty {
            lines.append("split by device: " + map.splitByDevice.sorted().joined(separator: ", "))
        }
        return lines.joined(separator: "\n")
    }
}
