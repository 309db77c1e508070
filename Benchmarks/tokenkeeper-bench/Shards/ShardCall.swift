/// What a client calls, straight or through a router.
struct ShardCall {
    /// How the rows of a round come.
    enum Kind {
        /// A prepared statement for so many rows at once.
        case prepared(Int, (ArraySlice<ShardRow>) -> [String])
        /// All rows of a round in one statement.
        case copy((ShardRow) -> String)
    }

    let name: String
    /// What one row is.
    let unit: String
    let user: String
    let statement: String
    let kind: Kind
    /// A condition on the tokens of a shard.
    var which = "true"

    /// How many rows a round has for each shard.
    func rows(_ scale: Scale, _ way: ShardClient.Way) -> Int {
        switch (kind, way) {
        case (.prepared(1, _), _): scale.shardCalls
        case (.prepared, _): scale.shardBatched
        case (.copy, .straight): scale.shardCopied
        // Each row is a round trip.
        case (.copy, .routed): scale.shardCalls
        }
    }

    static func all(_ scale: Scale) -> [ShardCall] {
        let columns = "topic, token, status, body, sent_at"
        return [
            ShardCall(
                name: "`register`", unit: "call", user: "an_app", statement: "SELECT tokenkeeper.register($1, $2)",
                kind: .prepared(1) { [$0.first!.token, $0.first!.topic] },
                // Those that no 410 has made stale.
                which: "place >= \(scale.shardTokens / 2)"),
            ShardCall(
                name: "`is_sendable`", unit: "call", user: "a_sender",
                statement: "SELECT tokenkeeper.is_sendable($1, $2)",
                kind: .prepared(1) { [$0.first!.token, $0.first!.topic] }),
            ShardCall(
                name: "`sendable`, 1,000 tokens a call", unit: "token", user: "a_sender",
                statement: "SELECT count(*) FROM tokenkeeper.sendable($1, $2)",
                kind: .prepared(1000) { [Self.array($0.map(\.token)), $0.first!.topic] },
                which: "topic = '\(Workload.topics[0])'"),
            ShardCall(
                name: "INSERT of one result", unit: "row", user: "a_sender",
                statement: "INSERT INTO tokenkeeper.send_result (\(columns)) VALUES ($1, $2, $3, $4, $5::timestamptz)",
                kind: .prepared(1) { rows in
                    let row = rows.first!
                    return [row.topic, row.token, Self.status(row), Self.body(row), Self.sentAt]
                }),
            ShardCall(
                name: "INSERT of 1,000 results", unit: "row", user: "a_sender",
                statement: """
                    INSERT INTO tokenkeeper.send_result (\(columns))
                    SELECT r.*, $5::timestamptz FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS r
                    """,
                kind: .prepared(1000) { rows in
                    [rows.map(\.topic), rows.map(\.token), rows.map(Self.status), rows.map(Self.body)].map(Self.array)
                        + [Self.sentAt]
                }),
            ShardCall(
                name: "COPY of results", unit: "row", user: "a_sender",
                statement: "COPY tokenkeeper.send_result (\(columns)) FROM STDIN",
                kind: .copy { "\($0.topic)\t\($0.token)\t\(Self.status($0))\t\(Self.body($0))\t\(Self.sentAt)\n" }),
        ]
    }

    private static let sentAt = "2026-11-06 20:00:00Z"

    /// One in 64 is a 410.
    private static func isStale(_ row: ShardRow) -> Bool {
        row.token.hasSuffix("0") && "048c".contains(row.token.dropLast().last!)
    }
    private static func status(_ row: ShardRow) -> String { isStale(row) ? "410" : "200" }
    private static func body(_ row: ShardRow) -> String {
        isStale(row) ? #"{"reason":"Unregistered","timestamp":1794000000123}"# : ""
    }

    private static func array(_ texts: [String]) -> String {
        "{" + texts.map { "\"" + $0.replacing("\"", with: "\\\"") + "\"" }.joined(separator: ",") + "}"
    }
}
