/// Attaches a table of the provider, or detaches it.
public struct Attachment: Sendable {
    /// The schema and name of the table.
    public let table: String
    /// The arguments of `tokenkeeper.attach`, by name; those that are missing have their defaults.
    public let arguments: [(name: String, value: String)]
    /// Whether the triggers also fire for what logical replication applies.
    public let isAlways: Bool

    /// What attach says, or would do.
    public struct Finding: Equatable, Sendable {
        public enum Kind: String, Equatable, Sendable, ColumnDecodable {
            /// What is in the way.
            case error
            /// What is worth knowing.
            case warning
            /// A statement that a dry run does not execute.
            case sql
            /// It is done.
            case attached
        }

        public let kind: Kind
        public let detail: String
    }

    /// A trigger needs a lock that keeps applications from writing to the table: better to fail than to let them wait behind this.
    private static let transaction = BatchTransaction(
        lockTimeout: .seconds(2), statementTimeout: .seconds(60), isDurable: true)

    public init(table: String, arguments: [(name: String, value: String)], isAlways: Bool) {
        self.table = table
        self.arguments = arguments
        self.isAlways = isAlways
    }

    /// - Parameter isDryRun: Whether only to look what is wrong and what would be done.
    public func perform(isDryRun: Bool, on connection: inout Connection) throws(DatabaseError) -> [Finding] {
        // The names are those of parameters, never what a person has typed.
        let named = arguments.indices.map { "\(arguments[$0].name) => $\($0 + 4)" }
        return try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT kind, detail FROM tokenkeeper.attach($1::regclass, always => $2, dry_run => $3, \(named.joined(separator: ", ")))
                """, [.text(table), .bool(isAlways), .bool(isDryRun)] + arguments.map { .text($0.value) }
            ).decode { row throws(DatabaseError) in Finding(kind: try row.read(), detail: try row.read()) }
        }
    }

    /// - Parameter table: As in SQL, or as it was called when it was attached, if it was dropped.
    public static func detach(_ table: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query("SELECT tokenkeeper.detach($1)", [.text(table)])
        }
    }

    /// A row of the view `tokenkeeper.attachment`.
    public struct Row: Equatable, Sendable {
        public let sourceID: Int64
        public let table: String
        /// In UTC.
        public let attachedAt: String
        /// `enabled`, `always`, `disabled`, `missing` or `dropped`.
        public let triggers: String
        public let fault: String?
        public let failures: Int64
        public let failure: String?
    }

    /// All attached tables, by name.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [Row] {
        try connection.query(
            """
            SELECT a.source_id, a.name, \(inUTC("a.attached_at")), a.triggers, a.fault, a.failures, a.failure
            FROM tokenkeeper.attachment AS a ORDER BY a.name
            """
        ).decode { row throws(DatabaseError) in
            Row(
                sourceID: try row.read(), table: try row.read(), attachedAt: try row.read(), triggers: try row.read(),
                fault: try row.read(), failures: try row.read(), failure: try row.read())
        }
    }

    /// The view as a JSON array.
    public static func json(on connection: inout Connection) throws(DatabaseError) -> String {
        try connection.query(
            "SELECT coalesce(jsonb_agg(to_jsonb(a) ORDER BY a.name), '[]')::text FROM tokenkeeper.attachment AS a"
        ).value()
    }
}
