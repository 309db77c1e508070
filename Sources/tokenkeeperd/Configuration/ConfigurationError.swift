/// What is wrong with the configuration: all problems at once, one line each, never the value of a secret.
struct ConfigurationError: Error, Equatable, CustomStringConvertible {
    let problems: [String]

    init(_ problems: [String]) {
        self.problems = problems
    }

    var description: String { problems.joined(separator: "\n") }
}
