/// Quotes words for a shell. People copy the commands that messages show, and a topic is whatever a sender wrote.
public enum ShellWord {
    /// An option with its value: `--topic com.example.app`.
    public static func option(_ name: String, _ value: String) -> String {
        name + (value.hasPrefix("-") ? "=" : " ") + quoted(value)
    }

    public static func quoted(_ word: String) -> String {
        let isPlain =
            !word.isEmpty
            && word.utf8.allSatisfy {
                switch $0 {
                case UInt8(ascii: "a")...UInt8(ascii: "z"), UInt8(ascii: "A")...UInt8(ascii: "Z"),
                    UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "."), UInt8(ascii: "-"), UInt8(ascii: "_"):
                    true
                default: false
                }
            }
        return isPlain
            ? word
            : "'" + word.split(separator: "'", omittingEmptySubsequences: false).joined(separator: "'\"'\"'") + "'"
    }
}
