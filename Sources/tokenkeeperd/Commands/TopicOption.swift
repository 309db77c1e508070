internal import ArgumentParser
internal import TokenLedger

/// Names a topic and its environment.
struct TopicOption: ParsableArguments {
    @Option(help: "The topic: the apns-topic header, as sent.")
    var topic: String

    @Option(help: "production or sandbox.")
    var environment = "production"

    /// These options as one would type them.
    static func typed(topic: String, environment: String) -> String {
        "\(ShellWord.option("--topic", topic)) --environment \(environment)"
    }
}
