internal import ArgumentParser

/// Names a topic and its environment.
struct TopicOption: ParsableArguments {
    @Option(help: "The topic: the apns-topic header, as sent.")
    var topic: String

    @Option(help: "production or sandbox.")
    var environment = "production"

    /// These options as one would type them. A topic is what some sender has written: quoted, lest a shell run it.
    static func typed(topic: String, environment: String) -> String {
        let isPlain = topic.utf8.allSatisfy { byte in
            switch byte {
            case UInt8(ascii: "a")...UInt8(ascii: "z"), UInt8(ascii: "A")...UInt8(ascii: "Z"),
                UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "."), UInt8(ascii: "-"), UInt8(ascii: "_"):
                true
            default: false
            }
        }
        let quoted =
            "'" + topic.split(separator: "'", omittingEmptySubsequences: false).joined(separator: "'\"'\"'") + "'"
        return "--topic \(isPlain ? topic : quoted) --environment \(environment)"
    }
}
