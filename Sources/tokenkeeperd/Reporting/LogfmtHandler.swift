internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import Synchronization

/// One line per entry on standard error: `time=… level=… msg="…" key=value`. The journal has its own clock and priorities: for it, the
/// time is left out and the line begins with `<priority>`.
struct LogfmtHandler: LogHandler {
    var metadata: Logger.Metadata = [:]

    /// Shared by all copies of the logger: a reload changes it everywhere.
    let threshold: LogThreshold

    var logLevel: Logger.Level {
        get { threshold.level }
        set { threshold.level = newValue }
    }

    func log(event: LogEvent) {
        var line =
            Journal.isListening
            ? "<\(Self.priority(of: event.level))>"
            : "time=\(Date.now.ISO8601Format(.iso8601(timeZone: .gmt, includingFractionalSeconds: true)))Z "
        line += "level=\(event.level) msg=\(Self.quoted(event.message.description))"
        for (key, value) in metadata.merging(event.metadata ?? [:], uniquingKeysWith: { $1 }).sorted(by: {
            $0.key < $1.key
        }) {
            line += " \(key)=\(Self.quoted("\(value)"))"
        }
        line += "\n"
        // One write per line: the lines of several threads do not mix.
        let bytes = Array(line.utf8)
        _ = unsafe write(STDERR_FILENO, bytes, bytes.count)
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

    private static func quoted(_ text: String) -> String {
        let plain =
            !text.isEmpty
            && text.utf8.allSatisfy { $0 > 0x20 && $0 < 0x7F && $0 != UInt8(ascii: "\"") && $0 != UInt8(ascii: "=") }
        if plain { return text }
        var quoted = "\""
        for scalar in text.unicodeScalars {
            switch scalar {
            case "\"": quoted += "\\\""
            case "\\": quoted += "\\\\"
            case "\n": quoted += "\\n"
            default: quoted.unicodeScalars.append(scalar.properties.generalCategory == .control ? "\u{FFFD}" : scalar)
            }
        }
        return quoted + "\""
    }

    subscript(metadataKey key: String) -> Logger.Metadata.Value? {
        get { metadata[key] }
        set { metadata[key] = newValue }
    }
}

/// The lowest level that is logged, for the whole process.
final class LogThreshold: Sendable {
    private let value: Mutex<Logger.Level>

    init(_ level: Logger.Level) {
        value = Mutex(level)
    }

    var level: Logger.Level {
        get { value.withLock { $0 } }
        set { value.withLock { $0 = newValue } }
    }
}
