internal import FoundationEssentials
internal import Logging

/// How an entry of the log becomes a line. The fields are in the order of their names.
enum LogFormat: String, CaseIterable, Sendable {
    /// `time=… level=… msg="…" key=value`. The journal has a clock of its own: for it, the time is left out.
    case logfmt
    /// `{"time":"…","level":"…","message":"…","key":"value"}`. Every value is a string.
    case json

    /// - Parameter toJournal: Whether systemd's journal reads the line. It removes the `<priority>` at the beginning.
    /// - Returns: The line without its end. It contains no control characters.
    func line(
        at time: Date, _ level: Logger.Level, _ message: String, _ metadata: Logger.Metadata, toJournal: Bool
    ) -> String {
        let priority = toJournal ? "<\(Self.priority(of: level))>" : ""
        let time = time.ISO8601Format(.iso8601(timeZone: .gmt, includingFractionalSeconds: true)) + "Z"
        let fields = metadata.sorted { $0.key < $1.key }.map { ($0.key, "\($0.value)") }
        switch self {
        case .logfmt:
            let head = [("level", "\(level)"), ("msg", message)]
            return priority
                + ((toJournal ? [] : [("time", time)]) + head + fields)
                .map { "\($0)=\(Self.word($1))" }.joined(separator: " ")
        case .json:
            let head = [("time", time), ("level", "\(level)"), ("message", message)]
            return priority + "{"
                + (head + fields).map { "\(Self.jsonText($0)):\(Self.jsonText($1))" }.joined(separator: ",") + "}"
        }
    }

    /// syslog's priorities, https://www.freedesktop.org/software/systemd/man/sd-daemon.html
    private static func priority(of level: Logger.Level) -> Int {
        switch level {
        case .trace, .debug: 7
        case .info: 6
        case .notice: 5
        case .warning: 4
        case .error: 3
        case .critical: 2
        }
    }

    /// In quotes, unless the text is one plain word.
    private static func word(_ text: String) -> String {
        let plain =
            !text.isEmpty
            && text.utf8.allSatisfy { $0 > 0x20 && $0 < 0x7F && $0 != UInt8(ascii: "\"") && $0 != UInt8(ascii: "=") }
        return plain ? text : quoted(text) { _ in "\u{FFFD}" }
    }

    private static func jsonText(_ text: String) -> String {
        quoted(text) { control in
            let digits = String(control.value, radix: 16)
            return "\\u" + String(repeating: "0", count: 4 - digits.count) + digits
        }
    }

    /// - Parameter control: What to write for a control character. All of them have at most two hexadecimal digits.
    private static func quoted(_ text: String, control: (Unicode.Scalar) -> String) -> String {
        var quoted = "\""
        for scalar in text.unicodeScalars {
            switch scalar {
            case "\"": quoted += "\\\""
            case "\\": quoted += "\\\\"
            case "\n": quoted += "\\n"
            case _ where scalar.properties.generalCategory == .control: quoted += control(scalar)
            default: quoted.unicodeScalars.append(scalar)
            }
        }
        return quoted + "\""
    }
}
