internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import Synchronization

/// One line per entry on standard error. The journal has priorities: for it, the line begins with `<priority>`.
struct StandardErrorLog: LogHandler {
    var metadata: Logger.Metadata = [:]

    /// Shared by all copies of the logger: a reload changes it everywhere.
    let threshold: LogThreshold

    let format: LogFormat

    var logLevel: Logger.Level {
        get { threshold.level }
        set { threshold.level = newValue }
    }

    func log(event: LogEvent) {
        let line = format.line(
            at: .now, event.level, event.message.description,
            metadata.merging(event.metadata ?? [:], uniquingKeysWith: { $1 }), toJournal: Journal.isListening)
        // One write per line: the lines of several threads do not mix.
        let bytes = Array("\(line)\n".utf8)
        _ = unsafe write(STDERR_FILENO, bytes, bytes.count)
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
