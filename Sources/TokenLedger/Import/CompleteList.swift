package import TokenModel

/// A complete list: a file that is imported again and again, and has all tokens each time. The table `tokenkeeper.list`.
package struct CompleteList: Sendable {
    package let name: String
    /// When the file was true.
    package let asOf: Instant

    package init(name: String, asOf: Instant) { (self.name, self.asOf) = (name, asOf) }

    /// Tokens that a part of the file has, in columns. Without rows that log out: as in an attached table, they are not in it.
    package struct Tokens: Sendable {
        package private(set) var environments: [String] = []
        package private(set) var topics: [String] = []
        /// In hex.
        package private(set) var tokens: [String] = []

        private static let tab = UInt8(ascii: "\t")
        private static let newline = UInt8(ascii: "\n")

        /// - Parameter rows: In the text format and the columns of `ImportSource.Queue.registration`.
        package init(rows: [UInt8]) {
            for row in rows.split(separator: Self.newline) {
                let fields = row.split(separator: Self.tab, omittingEmptySubsequences: false)
                guard fields.count == 9, fields[6].first != UInt8(ascii: "t") else { continue }
                append(Self.text(fields[0]), Self.text(fields[1]), Self.text(fields[8]).lowercased())
            }
        }

        private static func text(_ bytes: ArraySlice<UInt8>) -> String { String(decoding: bytes, as: UTF8.self) }

        private mutating func append(_ environment: String, _ topic: String, _ token: String) {
            environments.append(environment)
            topics.append(topic)
            tokens.append(token)
        }

        /// Those that are not among others, each once.
        package func new(in known: inout Set<Int>) -> Tokens {
            var new = Tokens(rows: [])
            for index in tokens.indices {
                var hasher = Hasher()
                hasher.combine(environments[index])
                hasher.combine(topics[index])
                hasher.combine(tokens[index])
                if known.insert(hasher.finalize()).inserted {
                    new.append(environments[index], topics[index], tokens[index])
                }
            }
            return new
        }

        fileprivate var parameters: [Parameter] { [.texts(environments), .texts(topics), .texts(tokens)] }
    }

    /// What is known of a list that this login has imported before.
    package struct State: Sendable {
        package let members: Int64
        /// Whether these are all tokens that it had.
        package let isKnown: Bool
        package let isLater: Bool
    }

    /// - Returns: Nil if there is no such list of this login.
    package func state(on connection: inout Connection) throws(DatabaseError) -> State? {
        try connection.query(
            """
            SELECT s.members, s.is_known, s.as_of > $2 FROM tokenkeeper.list_state($1) AS s WHERE s.as_of IS NOT NULL
            """, [.text(name), .instant(asOf)]
        ).first { row throws(DatabaseError) in
            State(members: try row.read(), isKnown: try row.read(), isLater: try row.read())
        }
    }

    /// How many of these tokens were in the list before.
    package func count(_ tokens: Tokens, on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try connection.query(
            "SELECT tokenkeeper.count_listed($1, $2, $3, $4)", [.text(name)] + tokens.parameters
        ).value()
    }

    /// Makes an import that begins one of the list, in the caller's transaction.
    func begin(_ source: Int64, on connection: inout Connection) throws(DatabaseError) {
        _ = try connection.query(
            "SELECT tokenkeeper.begin_list($1, $2, $3)", [.int8(source), .text(name), .instant(asOf)]
        ).count
    }

    /// Notes that these tokens are in the list, in the caller's transaction.
    ///
    /// - Returns: How many are back.
    static func note(
        _ tokens: Tokens, by source: Int64, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        if tokens.tokens.isEmpty { return 0 }
        return try connection.query(
            "SELECT tokenkeeper.note_listed($1, $2, $3, $4)", [.int8(source)] + tokens.parameters
        ).value()
    }

    /// Once all rows of an import are queued: queues the logouts of some of the tokens that it did not have.
    ///
    /// - Returns: How many tokens have left the list, and how many logouts that makes. Nothing is left when the first is 0.
    package static func logOut(
        by source: Int64, most: Int32, on connection: inout Connection
    ) throws(DatabaseError) -> (gone: Int64, queued: Int64) {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT o.gone, o.queued FROM tokenkeeper.log_out_unlisted($1, $2) AS o", [.int8(source), .int4(most)]
            ).one { row throws(DatabaseError) in (gone: try row.read(), queued: try row.read()) }
        }
    }
}
