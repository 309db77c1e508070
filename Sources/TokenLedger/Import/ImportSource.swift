/// The import of one file: a row of `tokenkeeper.registration_source`. What it queues, and how far it has come, commit together, so
/// that each part of the file is queued exactly once, whenever the process is killed.
package struct ImportSource: Sendable {
    package let id: Int64
    /// Where it continues, in the importer's own words.
    package let position: String
    /// What earlier runs have queued and refused.
    package let queued: Int64
    package let refused: Int64

    /// Which queue the rows go to.
    package enum Queue: Sendable {
        case registration
        case result

        fileprivate var table: String {
            switch self {
            case .registration: "tokenkeeper.registration"
            case .result: "tokenkeeper.send_result"
            }
        }

        /// The token comes last: it may have to be added to a row that is written already.
        var copy: String {
            switch self {
            case .registration:
                """
                COPY tokenkeeper.registration
                    (environment, topic, registered_at, device_id, user_id, tags, unregistered, source_id, token) FROM STDIN
                """
            case .result:
                "COPY tokenkeeper.send_result (environment, topic, status, body, sent_at, token) FROM STDIN"
            }
        }
    }

    /// Refuses a login that could not queue, before anything has begun.
    package static func checkRights(_ queue: Queue, on connection: inout Connection) throws(DatabaseError) {
        let may = try connection.query(
            """
            SELECT has_function_privilege('tokenkeeper.begin_import(text)', 'EXECUTE')
                AND has_column_privilege($1, 'token', 'INSERT')
            """, [.text(queue.table)]
        ).value(Bool.self)
        if !may { throw DatabaseError(sqlState: "42501", message: "permission denied for import into \(queue.table)") }
    }

    /// Begins an import.
    ///
    /// - Parameters:
    ///   - name: The file, as people know it.
    ///   - position: Where it begins.
    ///   - list: The complete list that the file is.
    package static func begin(
        _ name: String, position: String, list: CompleteList? = nil, on connection: inout Connection
    ) throws(DatabaseError) -> ImportSource {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            let id = try connection.query("SELECT tokenkeeper.begin_import($1)", [.text(name)]).value(
                Int64.self)
            let source = ImportSource(id: id, position: position, queued: 0, refused: 0)
            try list?.begin(id, on: &connection)
            try source.advance(to: position, queued: 0, refused: 0, isFinished: false, on: &connection)
            return source
        }
    }

    /// The imports of a file that this login has begun and not finished, the latest first. An import that has finished since makes
    /// earlier ones obsolete: the file of refused rows is now its own.
    package static func unfinished(
        _ name: String, on connection: inout Connection
    ) throws(DatabaseError) -> [ImportSource] {
        try connection.query(
            """
            SELECT s.source_id, s.position, s.queued, s.refused FROM tokenkeeper.registration_source AS s
            WHERE s.kind = 'import' AND s.name = $1 AND s.done_by = session_user AND s.finished_at IS NULL AND s.position IS NOT NULL
                AND s.withdrawn_at IS NULL AND NOT EXISTS (
                    SELECT FROM tokenkeeper.registration_source AS f
                    WHERE f.kind = 'import' AND f.name = $1 AND f.done_by = session_user AND f.finished_at IS NOT NULL
                        AND f.source_id > s.source_id)
            ORDER BY s.source_id DESC
            """, [.text(name)]
        ).decode { row throws(DatabaseError) in
            ImportSource(
                id: try row.read(), position: try row.read(), queued: try row.read(), refused: try row.read())
        }
    }

    /// The positions at which this login's imports of a file have finished, without those that were withdrawn.
    package static func finished(_ name: String, on connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query(
            """
            SELECT s.position FROM tokenkeeper.registration_source AS s
            WHERE s.kind = 'import' AND s.name = $1 AND s.done_by = session_user AND s.finished_at IS NOT NULL AND s.position IS NOT NULL
                AND s.withdrawn_at IS NULL
            """, [.text(name)]
        ).values(String.self)
    }

    /// Queues a batch.
    ///
    /// - Parameters:
    ///   - rows: In the text format of COPY.
    ///   - position: Where the import continues after it.
    ///   - queued: How many rows these are.
    ///   - refused: How many records were refused.
    ///   - isComplete: Whether the file is a complete list.
    /// - Returns: How many of the tokens are back in that list.
    package func commit(
        _ rows: [UInt8], to queue: Queue, position: String, queued: Int, refused: Int, isFinished: Bool,
        isComplete: Bool = false, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            if !rows.isEmpty {
                let copied = try connection.copy(queue.copy, rows: rows)
                guard copied == queued else {
                    throw DatabaseError(.unexpectedRow, "the server has copied \(copied) rows instead of \(queued)")
                }
            }
            try advance(to: position, queued: queued, refused: refused, isFinished: isFinished, on: &connection)
            return try isComplete ? CompleteList.note(CompleteList.Tokens(rows: rows), by: id, on: &connection) : 0
        }
    }

    /// The end of an import of a complete list, which comes after its logouts.
    package func finish(at position: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            try advance(to: position, queued: 0, refused: 0, isFinished: true, on: &connection)
        }
    }

    private func advance(
        to position: String, queued: Int, refused: Int, isFinished: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        _ = try connection.query(
            "SELECT tokenkeeper.advance_source($1, $2, $3, $4, $5)",
            [.int8(id), .text(position), .int8(Int64(queued)), .int8(Int64(refused)), .bool(isFinished)]
        ).count
    }
}

/// How the database reads a token.
package enum TokenReading: Equatable, Sendable {
    /// In hex.
    case token(String)
    /// Why it is none, with at most its first 8 characters.
    case fault(String)

    /// Reads tokens by the rule of the schema: `tokenkeeper.parse_token`.
    ///
    /// - Parameter isBase64: Whether they may be in base64.
    /// - Returns: As many as there are tokens, in their order.
    package static func read(
        _ tokens: [String], isBase64: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> [TokenReading] {
        if tokens.isEmpty { return [] }
        return try connection.query(
            """
            SELECT coalesce(p.hex, tokenkeeper.token_fault(t.token, $2)), p.hex IS NOT NULL
            FROM unnest($1) WITH ORDINALITY AS t (token, n), LATERAL (SELECT tokenkeeper.parse_token(t.token, $2) AS hex OFFSET 0) AS p
            ORDER BY t.n
            """, [.texts(tokens), .bool(isBase64)]
        ).decode { row throws(DatabaseError) in
            let text = try row.read(String.self)
            return try row.read(Bool.self) ? .token(text) : .fault(text)
        }
    }
}
