internal import FoundationEssentials
internal import Glibc
internal import TokenModel

/// Runs a command on databases of the map, all at once, each in a process of its own. Prints what each says as soon as it has ended.
struct FleetRun {
    private let map: TopicMap
    private let mapFile: String
    private let names: [String]
    private let arguments: FleetArguments

    private enum Outcome {
        case ended(CInt)
        case late
    }

    init(_ arguments: FleetArguments) throws(ConfigurationError) {
        mapFile = try TopicMap.file(of: try ConfigurationOptions(of: arguments.command).read())
        let map = try TopicMap(contentsOf: mapFile)
        if let unknown = arguments.names.first(where: { !map.names.contains($0) }) {
            throw ConfigurationError([
                "--on: \(mapFile) has no database \(ConfigurationProblems.quoted(unknown)), but "
                    + map.names.joined(separator: ", ")
            ])
        }
        names = arguments.names.isEmpty ? map.names : Set(arguments.names).sorted()
        (self.map, self.arguments) = (map, arguments)
    }

    /// - Returns: The exit status: 0 if all databases have answered and nothing was found.
    func run() throws(ConfigurationError) -> CInt {
        let deadline = ContinuousClock.now + arguments.limit
        var running: [ChildCommand] = []
        for name in names {
            running.append(try ChildCommand(name, arguments.command, environment: environment(for: name)))
        }
        var outcomes: [String: Outcome] = [:]
        while !running.isEmpty {
            wait(for: running, until: deadline)
            let isLate = ContinuousClock.now >= deadline
            for child in running where child.openPipes.isEmpty || isLate {
                let status = child.end(kills: !child.openPipes.isEmpty)
                outcomes[child.name] = status.map { .ended($0) } ?? .late
                print(report(child, status))
                fflush(nil)
            }
            running.removeAll { outcomes[$0.name] != nil }
        }
        if !isJSON { print("\n" + Self.summary(outcomes)) }
        return Self.exitStatus(outcomes)
    }

    private var isJSON: Bool { arguments.command.contains("--json") }

    private func environment(for name: String) -> [String: String] {
        ProcessInfo.processInfo.environment.merging([
            "TOKENKEEPER_DATABASE_URL": map.databases[name] ?? "", "TOKENKEEPER_MAP_FILE": mapFile,
            "TOKENKEEPER_MAP_DATABASE": name,
        ]) { $1 }
    }

    private func wait(for children: [ChildCommand], until deadline: ContinuousClock.Instant) {
        var ready = children.flatMap(\.openPipes).map { pollfd(fd: $0, events: Int16(POLLIN), revents: 0) }
        let left = max((deadline - .now) / .milliseconds(1), 0)
        guard unsafe poll(&ready, nfds_t(ready.count), CInt(min(left.rounded(.up), 1_000_000))) > 0 else { return }
        for pipe in ready where pipe.revents != 0 {
            children.first { $0.openPipes.contains(pipe.fd) }?.read(from: pipe.fd)
        }
    }

    /// What one database says, under its name; with `--json`, a line with one object.
    private func report(_ child: ChildCommand, _ status: CInt?) -> String {
        let late = "no answer within \(DurationText.text(arguments.limit))"
        if isJSON {
            let line = FleetLine(
                database: child.name, exitStatus: status, error: status == nil ? late : child.errors.text)
            return line.text(result: status == nil ? "" : child.output.text)
        }
        let lines = [child.output.text, child.errors.text, status == nil ? late : ""].filter { !$0.isEmpty }
        let indented = lines.joined(separator: "\n").split(separator: "\n", omittingEmptySubsequences: false)
            .map { $0.isEmpty ? "" : "  " + $0 }
        return ([child.name] + indented).joined(separator: "\n")
    }

    private static func summary(_ outcomes: [String: Outcome]) -> String {
        var failed: [String] = []
        var late: [String] = []
        for (name, outcome) in outcomes.sorted(by: { $0.key < $1.key }) {
            switch outcome {
            case .ended(0): continue
            case .ended(let status): failed.append("\(name) (\(status))")
            case .late: late.append(name)
            }
        }
        var words =
            "\(outcomes.count - failed.count - late.count) of \(counted(outcomes.count, "database", "databases")): done"
        if !failed.isEmpty { words += "; with another exit status than 0: " + failed.joined(separator: ", ") }
        if !late.isEmpty { words += "; no answer: " + late.joined(separator: ", ") }
        return words
    }

    /// That a database has not answered is worse than what any other says.
    private static func exitStatus(_ outcomes: [String: Outcome]) -> CInt {
        let statuses = outcomes.values.map { outcome in
            switch outcome {
            case .ended(let status): status
            case .late: ExitStatus.unavailable.rawValue
            }
        }
        return statuses.contains(ExitStatus.unavailable.rawValue)
            ? ExitStatus.unavailable.rawValue : statuses.max() ?? 0
    }
}

/// A line of `--json` for one database.
private struct FleetLine: Encodable {
    var database: String
    /// Null if the database has not answered in time.
    var exitStatus: CInt?
    var error: String

    private enum CodingKeys: String, CodingKey {
        case database
        case exitStatus = "exit_status"
        case error
    }

    /// - Parameter result: What the command has printed: one JSON text, or nothing.
    func text(result: String) -> String {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        let object = (try? encoder.encode(self)).map { String(decoding: $0, as: UTF8.self) } ?? "{}"
        // A JSON text has line breaks only between its parts.
        let line = String(result.map { $0 == "\n" ? " " : $0 })
        return object.dropLast() + ",\"result\":\(line.isEmpty ? "null" : line)}"
    }
}
