internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Names a topic and its environment.
struct TopicOption: ParsableArguments {
    @Option(help: "The topic (apns-topic).")
    var topic: String

    @Option(help: "production or sandbox.")
    var environment = "production"

    func validate() throws { try Self.check(environment: environment) }

    /// - Throws: Unless the environment is production or sandbox.
    static func check(environment: String) throws {
        if Environment(rawValue: environment) == nil {
            throw ValidationError(
                "--environment is \"\(HistoryText.plain(environment))\", expected production or sandbox.")
        }
    }

    /// These options as typed on a command line.
    static func typed(topic: String, environment: String) -> String {
        "\(ShellWord.option("--topic", topic)) --environment \(environment)"
    }
}
