/// The problems of a configuration, all at once, with one line each. No line shows the value of a secret.
struct ConfigurationError: Error, Equatable, CustomStringConvertible {
    let problems: [String]

    init(_ problems: [String]) {
        self.problems = problems
    }

    var description: String { problems.joined(separator: "\n") }
}
