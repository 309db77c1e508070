internal import ArgumentParser

/// A command for all databases of the map: `tokenkeeperd --all status`.
///
/// `--all`, `--on NAME` and `--time-limit DURATION` stand before the command's name or after it; behind `rejected`, `--all` is an option of
/// that command.
struct FleetArguments: Equatable {
    /// The databases; all of the map if it is empty.
    var names: [String] = []
    /// How long each database may take.
    var limit: Duration = .seconds(30)
    /// The arguments that are left.
    var command: [String] = []

    /// The commands that make sense for several databases at once.
    static let commands = [
        "status", "doctor", "explain", "topic", "campaign", "held", "reinstate", "rejected", "forget", "sweep",
        "migrate", "grants",
    ]

    /// - Returns: Nil unless the command is for databases of the map.
    /// - Throws: What is wrong.
    init?(_ arguments: [String]) throws(ValidationError) {
        var rest = arguments[...]
        var isForAll = false
        var limit: String?
        func value(of name: String, in argument: String) throws(ValidationError) -> String? {
            if argument.hasPrefix(name + "=") { return String(argument.dropFirst(name.count + 1)) }
            guard argument == name else { return nil }
            guard let next = rest.popFirst() else { throw ValidationError("\(name): a value is missing") }
            return next
        }
        while let argument = rest.popFirst() {
            if argument == "--" {
                command += [argument] + rest
                break
            } else if argument == "--all", command.first != "rejected" {
                isForAll = true
            } else if let name = try value(of: "--on", in: argument) {
                names.append(name)
            } else if let text = try value(of: "--time-limit", in: argument) {
                limit = text
            } else {
                command.append(argument)
            }
        }
        let isForHelp = command.contains { ["--help", "-h", "help"].contains($0) }
        if isForHelp || (!isForAll && names.isEmpty && limit == nil) { return nil }
        try check(isForAll: isForAll, limit: limit)
    }

    private mutating func check(isForAll: Bool, limit text: String?) throws(ValidationError) {
        if isForAll != names.isEmpty {
            throw ValidationError(
                isForAll ? "expected --all or --on, not both" : "--time-limit: only for --all and --on"
            )
        }
        if let text {
            guard let duration = DurationText.duration(text), duration > .zero else {
                throw ValidationError("--time-limit is \(text), expected a duration such as 30s or 10m")
            }
            limit = duration
        }
        guard let first = command.first(where: { !$0.hasPrefix("-") }), Self.commands.contains(first),
            command.first == first
        else {
            throw ValidationError(
                "expected a command after the databases that runs on several: " + Self.commands.joined(separator: ", ")
            )
        }
        if command.contains("--watch") { throw ValidationError("--watch draws one database") }
        if command.contains(where: { $0.hasPrefix("--database-url") }) {
            throw ValidationError("the map names the databases: leave out --database-url")
        }
        // Each database counts its own campaigns.
        if first == "campaign", command.dropFirst().contains(where: { Int($0) != nil }), isForAll {
            throw ValidationError(
                "a campaign's number is another campaign's in the next database: name the database with --on"
            )
        }
    }
}
