/// Moves a topic from one database to another. migrations/core/move.sql has the rules.
///
/// Each step is a transaction in each database. It may be repeated: the target knows how far it has come.
public struct TopicMove: Sendable {
    public let topic: String
    /// The databases, by their names in the map.
    public let source: String
    public let target: String

    /// How many tokens one transaction takes. It lasts some hundred milliseconds.
    private static let tokens: Int32 = 1000
    private static let rows: Int32 = 500
    private static let deleted: Int32 = 5000

    /// One time that all tokens of an environment come.
    public struct Stream: Sendable {
        public let environment: String
        /// False while both databases are written to. The final one comes after that, with the history.
        public let isFinal: Bool
        /// The key of the last token, in hex.
        fileprivate var position = ""
        public fileprivate(set) var taken: Int64 = 0
        public fileprivate(set) var isComplete = false

        public var hasBegun: Bool { isComplete || !position.isEmpty }

        fileprivate var name: String { "\(isFinal ? "final" : "copy") \(environment)" }
    }

    public init(_ topic: String, from source: String, to target: String) {
        (self.topic, self.source, self.target) = (topic, source, target)
    }

    /// The database that has a topic now, as this one knows it; nil if it is here.
    public static func movedTo(_ topic: String, on source: inout Connection) throws(DatabaseError) -> String? {
        try source.query(
            "SELECT t.moved_to FROM tokenkeeper.topic AS t WHERE t.topic = $1 AND t.moved_to IS NOT NULL LIMIT 1",
            [.text(topic)]
        ).first { row throws(DatabaseError) in try row.read() }
    }

    /// The topics that have begun to arrive, each with the database from which.
    public static func arriving(on target: inout Connection) throws(DatabaseError) -> [(topic: String, source: String)]
    {
        try target.query("SELECT DISTINCT a.topic, a.source FROM tokenkeeper.arrival AS a ORDER BY 1, 2").decode {
            row throws(DatabaseError) in
            (try row.read(), try row.read())
        }
    }

    /// How many tokens a topic has, in both environments.
    public func tokens(on source: inout Connection) throws(DatabaseError) -> Int64 {
        try source.query(
            """
            SELECT coalesce(sum(c.tokens), 0)::bigint FROM tokenkeeper.token_count AS c JOIN tokenkeeper.topic AS t USING (topic_id)
            WHERE t.topic = $1
            """, [.text(topic)]
        ).value()
    }

    /// Why the topic cannot move; nil if it can.
    public func fault(on source: inout Connection) throws(DatabaseError) -> String? {
        try source.query("SELECT tokenkeeper.move_fault($1)", [.text(topic)]).value(String?.self)
    }

    /// What the target has of the topic so far.
    public func streams(isFinal: Bool, on target: inout Connection) throws(DatabaseError) -> [Stream] {
        try ["production", "sandbox"].map { environment throws(DatabaseError) in
            var stream = Stream(environment: environment, isFinal: isFinal)
            let known = try target.query(
                """
                SELECT encode(a.position, 'hex'), a.taken, a.is_complete FROM tokenkeeper.arrival AS a
                WHERE a.source = $1 AND a.topic = $2 AND a.stream = $3
                """, [.text(source), .text(topic), .text(stream.name)]
            ).first { row throws(DatabaseError) in
                (try row.read(String.self), try row.read(Int64.self), try row.read(Bool.self))
            }
            if let known { (stream.position, stream.taken, stream.isComplete) = known }
            return stream
        }
    }

    /// The policies come where the target has none of its own.
    public func copyPolicies(from source: inout Connection, to target: inout Connection) throws(DatabaseError) {
        let policies = try source.query(
            "SELECT p.environment, to_jsonb(p)::text FROM tokenkeeper.topic_policy AS p WHERE p.topic = $1",
            [.text(topic)]
        ).decode { row throws(DatabaseError) in (try row.read(String.self), try row.read(String.self)) }
        for (environment, policy) in policies {
            _ = try target.query(
                "SELECT tokenkeeper.take_policy($1, $2, $3::jsonb)", [.text(topic), .text(environment), .text(policy)])
        }
    }

    /// Sends the next tokens.
    ///
    /// - Returns: How many. None, and `isComplete`, at the end.
    public func next(
        _ stream: inout Stream, from source: inout Connection, to target: inout Connection
    ) throws(DatabaseError) -> Int64 {
        let (lastKey, tokens, facts, history) = try source.query(
            "SELECT encode(f.last_key, 'hex'), f.tokens, f.facts, f.history FROM tokenkeeper.facts_of($1, $2, decode($3, 'hex'), $4, $5) AS f",
            [
                .text(topic), .text(stream.environment), .text(stream.position), .int4(Self.tokens),
                .bool(stream.isFinal),
            ]
        ).one { row throws(DatabaseError) in
            (
                try row.read(String?.self), try row.read(Int32.self), try row.read(String?.self),
                try row.read(String?.self)
            )
        }
        let after = stream.position
        let parameters: [Parameter] = [
            .text(self.source), .text(topic), .text(stream.environment), .bool(stream.isFinal), .text(after),
            .text(lastKey), .text(facts), .text(history),
        ]
        stream.position = try target.transaction(.command) { target throws(DatabaseError) in
            try target.query(
                "SELECT encode(tokenkeeper.take_facts($1, $2, $3, $4, decode($5, 'hex'), decode($6, 'hex'), $7, $8), 'hex')",
                parameters
            ).value()
        }
        stream.isComplete = lastKey == nil
        stream.taken += Int64(tokens)
        return Int64(tokens)
    }

    /// Marks the topic as moved.
    ///
    /// - Returns: The first transaction that must notice: see `isNoticed`.
    public func begin(on source: inout Connection) throws(DatabaseError) -> String {
        try source.transaction(.command) { source throws(DatabaseError) in
            _ = try source.query("SELECT tokenkeeper.begin_move($1, $2)", [.text(topic), .text(target)])
        }
        // Once it is committed: others may have begun meanwhile.
        return try source.query("SELECT pg_snapshot_xmax(pg_current_snapshot())::text").value()
    }

    /// The topic is to come back to the target, from which it has moved: the target takes it as its own again.
    public func takeBack(on target: inout Connection) throws(DatabaseError) {
        _ = try target.transaction(.command) { target throws(DatabaseError) in
            try target.query("SELECT tokenkeeper.take_back($1)", [.text(topic)]).value(Int64.self)
        }
    }

    /// Whether all transactions before this one have ended. Until then, some may write to the topic.
    public static func isNoticed(_ transaction: String, on source: inout Connection) throws(DatabaseError) -> Bool {
        try source.query("SELECT pg_snapshot_xmin(pg_current_snapshot()) >= $1::xid8", [.text(transaction)]).value()
    }

    /// Whether both are one database under two names.
    public static func areOne(_ one: inout Connection, _ other: inout Connection) throws(DatabaseError) -> Bool {
        let name = "SELECT current_database() || ' ' || pg_postmaster_start_time()::text"
        return try one.query(name).value(String.self) == other.query(name).value(String.self)
    }

    /// What the topic still has in the source, besides its tokens, each with its number.
    public func leftBehind(on source: inout Connection) throws(DatabaseError) -> [String] {
        try source.query("SELECT l.what || ': ' || l.number FROM tokenkeeper.left_behind($1) AS l", [.text(topic)])
            .values()
    }

    /// Deletes some tokens from the source.
    ///
    /// - Returns: How many. None at the end: then the topic is no longer marked there.
    public func end(on source: inout Connection) throws(DatabaseError) -> Int64 {
        try source.transaction(.command) { source throws(DatabaseError) in
            try source.query("SELECT tokenkeeper.end_move($1, $2)", [.text(topic), .int4(Self.deleted)]).value()
        }
    }

    public func forget(on target: inout Connection) throws(DatabaseError) {
        _ = try target.query("SELECT tokenkeeper.forget_arrival($1, $2)", [.text(source), .text(topic)])
    }
}

extension TopicMove {
    /// The topics with rows that wait to be passed on, and their databases as the source knows them.
    public static func withLateRows(on source: inout Connection) throws(DatabaseError) -> [String] {
        try source.query("SELECT DISTINCT r.topic FROM tokenkeeper.moved_row AS r ORDER BY 1 LIMIT 100").values()
    }

    /// Passes on some rows that reached the source's queues after the topic had moved.
    ///
    /// The target commits first. If this process dies then, the target knows the same rows when they come again.
    ///
    /// - Returns: How many; none at the end, or while another session does the same.
    public func passOn(
        from source: inout Connection, to target: inout Connection
    ) throws(DatabaseError) -> Int {
        try source.transaction(.command) { source throws(DatabaseError) in
            let found = try source.query(
                "SELECT m.row_ids::text, cardinality(m.row_ids), m.rows FROM tokenkeeper.moved_rows($1, $2) AS m",
                [.text(topic), .int4(Self.rows)]
            ).first { row throws(DatabaseError) in
                (try row.read(String.self), try row.read(Int32.self), try row.read(String.self))
            }
            guard let (ids, count, rows) = found else { return 0 }
            try target.transaction(.command) { target throws(DatabaseError) in
                _ = try target.query(
                    "SELECT tokenkeeper.take_rows($1, $2, $3)", [.text(self.source), .text(topic), .text(rows)])
            }
            _ = try source.query("SELECT tokenkeeper.drop_moved_rows($1::bigint[])", [.text(ids)])
            return Int(count)
        }
    }
}
