internal import FoundationEssentials

/// A comparison of an attached table with the ledger and its queue, in both directions.
///
/// The session must be one of the table's owner, because it executes what belongs to the table.
public struct TableCheck: Sendable {
    /// The number of the registration_source of what repairs it.
    public let sourceID: Int64
    /// The name of the attachment.
    public let name: String
    /// How many rows the table has by PostgreSQL's statistics; nil if it was never analyzed.
    public let estimated: Int64?

    /// A row of which the ledger says something else, or a token that no row has any more.
    public struct Difference: Decodable, Equatable, Sendable {
        /// The key of the row, as text; nil for a token that no row has.
        public let row: String?
        /// In words: unknown, logged out, not logged out, registered later, another user, another device, other tags, no row.
        public let difference: String
        public let environment: String
        public let topic: String
        /// In plain hex.
        public let token: String
    }

    /// What a part of the table has shown.
    public struct Page: Sendable {
        /// How many rows were read.
        public let rows: Int64
        /// For how many an expression fails.
        public let failed: Int64
        public let differences: [Difference]
        /// As the server has returned them, for `repair`.
        fileprivate let json: String

        fileprivate init(rows: Int64, failed: Int64, json: String) throws(DatabaseError) {
            guard let differences = try? JSONDecoder().decode([Difference].self, from: Data(json.utf8)) else {
                throw DatabaseError(.unexpectedRow, "a check returned \(json.prefix(200))")
            }
            (self.rows, self.failed, self.differences, self.json) = (rows, failed, differences, json)
        }
    }

    private static let transaction = BatchTransaction(
        lockTimeout: .seconds(5), statementTimeout: .seconds(60), isDurable: true)

    /// - Parameter name: That of the attachment, or of its table.
    public init(of name: String, on connection: inout Connection) throws(DatabaseError) {
        self = try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            try connection.query("SELECT source_id, name, estimated FROM tokenkeeper.begin_check($1)", [.text(name)])
                .one { row throws(DatabaseError) in
                    TableCheck(sourceID: try row.read(), name: try row.read(), estimated: try row.read())
                }
        }
    }

    private init(sourceID: Int64, name: String, estimated: Int64?) {
        (self.sourceID, self.name, self.estimated) = (sourceID, name, estimated)
    }

    /// Reads the table in one snapshot, page by page.
    ///
    /// - Parameter see: Called with each page; it returns whether to go on.
    /// - Returns: Whether it has come to the end.
    public func perform(
        on connection: inout Connection, _ see: (Page) throws -> Bool
    ) throws -> Bool {
        try connection.transaction(BatchTransaction(mode: .snapshot, lockTimeout: .seconds(5), statementTimeout: nil)) {
            connection throws in
            var after: String?
            var isFinished = false
            var size = PageSize(most: 10_000)
            while !isFinished {
                let page: Page
                (page, after, isFinished) = try connection.query(
                    "SELECT rows, failed, differences::text, reached, finished FROM tokenkeeper.check_rows($1, $2, $3)",
                    [.int8(sourceID), .text(after), .int4(Int32(size.value))]
                ).one { row throws(DatabaseError) in
                    (
                        try Page(rows: try row.read(), failed: try row.read(), json: try row.read()), try row.read(),
                        try row.read()
                    )
                }
                size.took(page.rows)
                if try !see(page) { return false }
            }
            let lost: String = try connection.query(
                "SELECT tokenkeeper.check_lost($1)::text", [.int8(sourceID)]
            ).value()
            return try see(Page(rows: 0, failed: 0, json: lost))
        }
    }

    /// Queues what repairs a page, in a session without the snapshot.
    ///
    /// - Returns: How many registrations and logouts.
    public func repair(_ page: Page, on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.queue_repairs($1, $2::jsonb)", [.int8(sourceID), .text(page.json)]
            ).value()
        }
    }

    /// Notes that it has come to its end.
    public func end(differences: Int64, repaired: Int64, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(Self.transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                "SELECT tokenkeeper.end_check($1, $2, $3)", [.int8(sourceID), .int8(differences), .int8(repaired)])
        }
    }
}
