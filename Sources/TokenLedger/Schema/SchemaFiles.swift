/// The files of `migrations/`: what a schema is built from.
public struct SchemaFiles: Equatable, Sendable {
    /// In order of their numbers.
    public var versions: [Migration]
    /// Functions and views, in the order in which they are applied: that of `migrations/load-order`.
    public var repeatables: [Repeatable]
    /// The roles and their rights.
    public var grants: Repeatable

    public init(versions: [Migration], repeatables: [Repeatable], grants: Repeatable) {
        self.versions = versions.sorted { $0.version < $1.version }
        self.repeatables = repeatables
        self.grants = grants
    }

    /// The files in this binary.
    public static let embedded = SchemaFiles(
        versions: EmbeddedSQL.files.compactMap { name, text in
            name.hasPrefix("versions/") ? Migration(file: String(name.dropFirst("versions/".count)), sql: text) : nil
        },
        repeatables: EmbeddedSQL.files.compactMap { name, text in
            name.hasPrefix("versions/") || name == Grants.file || name == RouterScript.file
                ? nil : Repeatable(file: name, sql: text)
        },
        grants: Repeatable(file: Grants.file, sql: Grants.sql))

    /// The text of each file in this binary, by its path in `migrations/`.
    package static let embeddedTexts = Dictionary(uniqueKeysWithValues: EmbeddedSQL.files.map { ($0.name, $0.text) })
}

/// A file of SQL that can be applied again and again: functions, views or grants.
public struct Repeatable: Equatable, Sendable {
    /// The path in `migrations/` without the extension, such as `core/register`.
    public let name: String
    public let sql: String

    public init(file: String, sql: String) {
        name = file.hasSuffix(".sql") ? String(file.dropLast(4)) : file
        self.sql = sql
    }
}
