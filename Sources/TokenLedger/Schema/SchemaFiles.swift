/// The files of `migrations/`: what a schema is built from.
public struct SchemaFiles: Equatable, Sendable {
    /// In order of their numbers.
    public var versions: [Migration]
    /// Functions and views, in the order in which they are applied: by file name, without the folder.
    public var repeatables: [Repeatable]
    /// The roles and their rights.
    public var grants: Repeatable

    public init(versions: [Migration], repeatables: [Repeatable], grants: Repeatable) {
        self.versions = versions.sorted { $0.version < $1.version }
        self.repeatables = repeatables.sorted { $0.stem < $1.stem }
        self.grants = grants
    }

    /// The files in this binary.
    public static let embedded = SchemaFiles(
        versions: embeddedTexts.compactMap { name, text in
            name.hasPrefix("versions/") ? Migration(file: String(name.dropFirst("versions/".count)), sql: text) : nil
        },
        repeatables: embeddedTexts.compactMap { name, text in
            name.hasPrefix("functions/") || name.hasPrefix("views/") ? Repeatable(file: name, sql: text) : nil
        },
        grants: Repeatable(file: Grants.file, sql: Grants.sql))

    /// The text of each file in this binary, by its path in `migrations/`.
    package static let embeddedTexts = Dictionary(uniqueKeysWithValues: EmbeddedSQL.files.map { ($0.name, $0.text) })
}

/// A file of SQL that can be applied again and again: functions, views or grants.
public struct Repeatable: Equatable, Sendable {
    /// The path in `migrations/` without the extension, such as `functions/20_registration`.
    public let name: String
    public let sql: String

    public init(file: String, sql: String) {
        name = file.hasSuffix(".sql") ? String(file.dropLast(4)) : file
        self.sql = sql
    }

    /// The file name without folder and extension, by which files are ordered.
    var stem: Substring { name.split(separator: "/").last ?? "" }
}
