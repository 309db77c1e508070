/// One file of `migrations/`, plain SQL, named `0001_what_it_makes.sql`.
public struct Migration: Equatable, Sendable {
    public let version: Int
    public let name: String
    public let sql: String
    /// The oldest daemon that works with the schema after this migration, from the file's first line.
    public let oldestDaemon: Version

    /// - Returns: Nil when the file is not named or does not begin as a migration must.
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

    /// Those in this binary, in order.
    public static let embedded: [Migration] = EmbeddedSQL.files
        .compactMap { Migration(file: $0.name, sql: $0.text) }
        .sorted { $0.version < $1.version }

    /// The files in this binary as they are in `migrations/`, by name.
    package static let embeddedFiles = Dictionary(uniqueKeysWithValues: EmbeddedSQL.files.map { ($0.name, $0.text) })
}
