/// One file of `migrations/versions/`: plain SQL, named `0001_what_it_makes.sql`.
public struct Migration: Equatable, Sendable {
    public let version: Int
    public let name: String
    public let sql: String
    /// The oldest daemon that works with the schema after this version, from the file's first line.
    public let oldestDaemon: Version

    /// - Returns: Nil if the file's name or first line is not that of a version.
    public init?(file: String, sql: String) {
        let stem = file.hasSuffix(".sql") ? file.dropLast(4) : ""
        let opening = "-- oldest daemon: "
        guard let underscore = stem.firstIndex(of: "_"), let version = Int(stem[..<underscore]), version > 0,
            let firstLine = sql.split(separator: "\n", maxSplits: 1).first, firstLine.hasPrefix(opening),
            let oldestDaemon = Version(firstLine.dropFirst(opening.count))
        else { return nil }
        self.version = version
        self.name = String(stem[stem.index(after: underscore)...])
        self.sql = sql
        self.oldestDaemon = oldestDaemon
    }

    /// The name under which its checksum is kept; versions and repeatables share one list.
    var file: String { "versions/\(version)_\(name)" }
}
