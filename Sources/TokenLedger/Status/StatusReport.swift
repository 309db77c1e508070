/// The row of the view `tokenkeeper.status`, for people and for programs. Every column of the view is in it.
public struct StatusReport: Sendable {
    /// A column with one value.
    public struct Field: Equatable, Sendable {
        /// How to read the value.
        public enum Kind: Equatable, Sendable {
            case number
            /// A span of time, in whole seconds.
            case seconds
            case text
        }

        /// The column's name.
        public var name: String
        public var kind: Kind
        /// Nil for null. An instant is in UTC, to the second.
        public var value: String?

        public init(name: String, kind: Kind, value: String?) {
            self.name = name
            self.kind = kind
            self.value = value
        }
    }

    /// One object of JSON, in the view's order and with its names. Ages are in seconds.
    public let json: String
    /// In the view's order.
    public let fields: [Field]
    /// The most important first.
    public let warnings: [String]
    /// The warnings that somebody has to get up for, in the view's order. They are in `warnings`, too.
    public let criticalWarnings: [String]

    public init(json: String, fields: [Field], warnings: [String], criticalWarnings: [String]) {
        self.json = json
        self.fields = fields
        self.warnings = warnings
        self.criticalWarnings = criticalWarnings
    }

    /// When the number in a column was true, as text; nil if that is not known.
    public func asOf(_ column: String) -> String? {
        let own: String? =
            switch column {
            case let name where name.hasSuffix("per_second") || Self.ofQueue.contains(name): "queue_as_of"
            case "campaign_requests": nil
            case "oldest_due_request_age": "requests_as_of"
            default: column + "_as_of"
            }
        let values = [own, "as_of"].compactMap { name in fields.first { $0.name == name } }
        return values.first?.value
    }

    /// What a daemon's heartbeat says.
    private static let ofQueue = [
        "queue_depth", "queue_depth_estimated", "oldest_result_age", "results_wait_because", "registration_queue_depth",
        "registration_queue_estimated", "oldest_registration_age", "registrations_wait_because",
    ]

    /// The view answers within milliseconds. If another session has locked a table of it, this throws, and does not wait for long.
    private static let reading = BatchTransaction(
        mode: .snapshot, lockTimeout: .seconds(3), statementTimeout: .seconds(8), isInUTC: true)

    /// - Parameter findings: Further warnings, which the view does not know of.
    /// - Throws: Within ten seconds, if the server answers.
    public init(on connection: inout Connection, with findings: [String] = []) throws(DatabaseError) {
        self = try connection.transaction(Self.reading) { connection throws(DatabaseError) in
            try Self.read(with: findings, on: &connection)
        }
    }

    /// The number in a column; nil for null.
    public func number(_ column: String) -> Int64? {
        fields.first { $0.name == column }?.value.flatMap { Int64($0) }
    }

    /// Reads it in the caller's transaction, which is in UTC.
    static func read(
        with findings: [String] = [], on connection: inout Connection
    ) throws(DatabaseError) -> StatusReport {
        let columns = try connection.query(
            """
            SELECT e.name, t.typname::text,
                   CASE WHEN t.typname = 'interval' AND v.text IS NOT NULL
                        THEN extract(epoch FROM v.text::interval)::bigint::text ELSE e.value::text END,
                   CASE t.typname WHEN 'interval' THEN extract(epoch FROM v.text::interval)::bigint::text
                                  WHEN 'timestamptz' THEN to_char(v.text::timestamptz, 'YYYY-MM-DD HH24:MI:SS "UTC"')
                                  ELSE v.text END,
                   CASE WHEN json_typeof(e.value) = 'array' THEN ARRAY(SELECT json_array_elements_text(e.value)) ELSE '{}' END
            FROM tokenkeeper.status AS s
            CROSS JOIN LATERAL json_each(row_to_json(s)) WITH ORDINALITY AS n (name, own, place)
            CROSS JOIN LATERAL (
                SELECT n.name, n.place, CASE n.name WHEN 'warnings' THEN array_to_json(s.warnings || $1::text[]) ELSE n.own END AS value) AS e
            CROSS JOIN LATERAL (SELECT e.value #>> '{}' AS text) AS v
            JOIN pg_catalog.pg_attribute AS a ON a.attrelid = 'tokenkeeper.status'::regclass AND a.attname = e.name
            JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
            ORDER BY e.place
            """, [.texts(findings)]
        ).decode { row throws(DatabaseError) in
            (
                name: try row.read(String.self), type: try row.read(String.self), json: try row.read(String.self),
                text: try row.read(String?.self), words: try row.read([String].self)
            )
        }
        func words(_ name: String) -> [String] { columns.first { $0.name == name }?.words ?? [] }
        return StatusReport(
            json: "{" + columns.map { "\"\($0.name)\":\($0.json)" }.joined(separator: ",") + "}",
            fields: columns.filter { !$0.type.hasPrefix("_") }.map {
                Field(name: $0.name, kind: Field.Kind(type: $0.type), value: $0.text)
            },
            warnings: words("warnings"), criticalWarnings: words("critical_warnings"))
    }
}

extension StatusReport.Field.Kind {
    /// - Parameter type: A name of `pg_type`.
    fileprivate init(type: String) {
        switch type {
        case "interval": self = .seconds
        case "int2", "int4", "int8", "float8", "numeric": self = .number
        default: self = .text
        }
    }
}
