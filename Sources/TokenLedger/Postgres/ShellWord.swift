/// Quotes words for a shell. People copy the commands that messages show, and a topic is whatever a sender wrote.
public enum ShellWord {
    /// An option with its value: `--topic com.example.app`.
    public static func option(_ name: String, _ value: String) -> String {
        name + (value.hasPrefix("-") ? "=" : " ") + quoted(value)
    }

    /// Whether a shell into which a command is pasted expands nothing in it: outside single quotes, it has none of the characters for that.
    /// In a command for psql, a name in double quotes may have them.
    public static func isInert(_ command: String) -> Bool {
        var quote: Character?
        for character in command {
            if character == "`"
                || character.unicodeScalars.contains(where: { $0.properties.generalCategory == .control })
            {
                return false
            }
            if quote != "'", "$!\\".contains(character) { return false }
            if character == quote {
                quote = nil
            } else if quote == nil, character == "'" || character == "\"" {
                quote = character
            }
        }
        return quote == nil
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
