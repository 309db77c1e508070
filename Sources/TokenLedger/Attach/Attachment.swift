/// Attaches a table of the provider, or detaches it.
public struct Attachment: Sendable {
    /// The name of the table, as in SQL. The schema may be left out if only one table has the name.
    public let table: String
    /// The arguments of `tokenkeeper.attach`, by name; those that are missing have their defaults.
    public let arguments: [(name: String, value: String)]
    /// Whether the triggers also fire for what logical replication applies.
    public let isAlways: Bool
    /// Whether to say what SQL it executes.
    public let isVerbose: Bool

    /// What attach says, or would do.
    public struct Finding: Equatable, Sendable {
        public enum Kind: String, Equatable, Sendable, ColumnDecodable {
            /// What is in the way.
            case error
            /// What is worth knowing.
            case warning
            /// What the expressions give for a row.
            case row
            /// A statement that attach executes, or would.
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

    public init(table: String, arguments: [(name: String, value: String)], isAlways: Bool, isVerbose: Bool) {
        self.table = table
        self.arguments = arguments
        self.isAlways = isAlways
        self.isVerbose = isVerbose
    }

    /// - Parameter isDryRun: Whether only to look what is wrong and what would be done.
    public func perform(isDryRun: Bool, on connection: inout Connection) throws(DatabaseError) -> [Finding] {
        // The names are those of parameters, never what a person has typed.
        let named = arguments.indices.map { "\(arguments[$0].name) => $\($0 + 5)" }
        return try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT kind, detail
                FROM tokenkeeper.attach($1, always => $2, dry_run => $3, verbose => $4, \(named.joined(separator: ", ")))
                """,
                [.text(table), .bool(isAlways), .bool(isDryRun), .bool(isVerbose)] + arguments.map { .text($0.value) }
            ).decode { row throws(DatabaseError) in Finding(kind: try row.read(), detail: try row.read()) }
        }
    }

    /// - Parameter name: That of the attachment, or of its table.
    public static func detach(_ name: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query("SELECT tokenkeeper.detach($1)", [.text(name)])
        }
    }

    /// A row of the view `tokenkeeper.attachment`.
    public struct Row: Equatable, Sendable {
        public let sourceID: Int64
        public let name: String
        /// The schema and name of its table, when it was attached.
        public let table: String
        /// In UTC.
        public let attachedAt: String
        /// `enabled`, `always`, `disabled`, `missing` or `dropped`.
        public let triggers: String
        public let fault: String?
        public let failures: Int64
        public let failure: String?
        /// When a check last came to its end, in UTC; nil if none has.
        public let checkedAt: String?
        /// How many tokens differed then.
        public let differences: Int64?
    }

    /// All attached tables, by name.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [Row] {
        try connection.query(
            """
            SELECT a.source_id, a.name, a.table_name, \(inUTC("a.attached_at")), a.triggers, a.fault, a.failures, a.failure,
                   \(inUTC("a.checked_at")), a.differences
            FROM tokenkeeper.attachment AS a ORDER BY a.name
            """
        ).decode { row throws(DatabaseError) in
            Row(
                sourceID: try row.read(), name: try row.read(), table: try row.read(), attachedAt: try row.read(),
                triggers: try row.read(), fault: try row.read(), failures: try row.read(), failure: try row.read(),
                checkedAt: try row.read(), differences: try row.read())
        }
    }

    /// The view as a JSON array.
    public static func json(on connection: inout Connection) throws(DatabaseError) -> String {
        try connection.query(
            "SELECT coalesce(jsonb_agg(to_jsonb(a) ORDER BY a.name), '[]')::text FROM tokenkeeper.attachment AS a"
        ).value()
    }
}
