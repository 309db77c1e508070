/// The gate compared with a bare look-up by key, on the large ledger: prepared round trips over the local socket, warm sessions.
struct GateMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let bare = "look-up by key"
    private static let gate = "is_sendable"
    private static let batches = [100, 1000, 10_000]

    func run() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let contest = try Contest(
            "the gate, \(Scale.short(workload.tokens)) tokens", rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.bare) { round in
                    try singles(
                        round, database, session,
                        "SELECT suppressed FROM tokenkeeper.ledger WHERE topic_id = 1 AND token_key = $1::bytea"
                    ) { ["\\x" + $0] }
                },
                Contest.Contestant(name: Self.gate) { round in
                    try singles(round, database, session, "SELECT tokenkeeper.is_sendable($1, $2)") { [$0, topic] }
                },
            ]
                + Self.batches.map { batch in
                    Contest.Contestant(name: "sendable, \(batch)") { try batched(batch, $0, database, session) }
                })
        report.add(contest)
        report.compare(
            "is_sendable over a bare look-up by key, time of a round trip, \(Scale.short(workload.tokens)) tokens",
            contest.ratio(Self.bare, over: Self.gate), atMost: 1.7)
        for batch in Self.batches {
            let microseconds = Spread((contest.samples["sendable, \(batch)"] ?? []).map { 1_000_000 / $0.rate })
            report.compare(
                "sendable, \(batch) tokens of \(Scale.short(workload.tokens)), a token", microseconds,
                atMost: batch == 10_000 ? 8 : nil, digits: 1, unit: " µs")
        }
    }

    /// The first topic, whose number is 1.
    private var topic: String { Workload.topics[0] }

    /// Tokens of the first topic, different ones in each round.
    private func tokens(_ count: Int, _ round: Int, _ session: Session) throws -> [String] {
        let first = round * count * 4
        return try session.texts(workload.tokens(first..<first + count * 4, of: 1) + " LIMIT \(count)")
    }

    private func singles(
        _ round: Int, _ database: Database, _ session: Session, _ statement: String, _ values: (String) -> [String]
    ) throws -> Sample {
        let asked = try tokens(scale.calls, round, session).map(values)
        let client = try PreparedClient(database)
        try client.prepare("ask", statement)
        for values in asked.prefix(1000) { try client.call("ask", values) }
        let stopwatch = try Stopwatch(cluster)
        for values in asked { try client.call("ask", values) }
        return try stopwatch.sample(rows: asked.count)
    }

    private func batched(_ batch: Int, _ round: Int, _ database: Database, _ session: Session) throws -> Sample {
        let asked = try tokens(max(scale.calls, 20_000), round, session)
        let arrays = stride(from: 0, to: asked.count, by: batch).map {
            "{" + asked[$0..<min($0 + batch, asked.count)].joined(separator: ",") + "}"
        }
        let client = try PreparedClient(database)
        try client.prepare("ask", "SELECT tokenkeeper.sendable($1, $2)")
        for _ in 0..<6 { try client.call("ask", [arrays[0], topic]) }
        let stopwatch = try Stopwatch(cluster)
        for array in arrays { try client.call("ask", [array, topic]) }
        return try stopwatch.sample(rows: asked.count)
    }
}
