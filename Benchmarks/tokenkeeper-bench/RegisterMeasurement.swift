import Foundation

/// The cost for applications: `register` of an active token compared with a bare upsert of the same row.
struct RegisterMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let bare = "bare upsert"
    private static let register = "register"

    func run() throws {
        let databases = try [cluster.copy(of: template), cluster.copy(of: template)]
        defer { for database in databases { try? database.drop() } }
        let contest = try Contest(
            "register, \(Scale.short(workload.tokens)) tokens", rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.bare) { round in
                    try calls(
                        round, databases[0],
                        """
                        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at)
                        VALUES ($2::integer, decode($1, 'hex'), clock_timestamp())
                        ON CONFLICT (topic_id, token_key) DO UPDATE
                        SET registered_at = greatest(l.registered_at, excluded.registered_at)
                        """
                    ) { [$0, "\($1 + 1)"] }
                },
                Contest.Contestant(name: Self.register) { round in
                    try calls(round, databases[1], "SELECT tokenkeeper.register($1, $2)") { [$0, Workload.topics[$1]] }
                },
            ])
        report.add(contest)
        report.compare(
            "register of an active token over a bare upsert, time of a round trip",
            contest.ratio(Self.bare, over: Self.register), atMost: 1.5)
        // The sessions have ended, and report their statistics when they end.
        Thread.sleep(forTimeInterval: 1)
        let hot = try databases[1].session().number(
            """
            SELECT 100.0 * n_tup_hot_upd / greatest(n_tup_upd, 1) FROM pg_stat_user_tables
            WHERE relid = 'tokenkeeper.ledger'::regclass
            """)
        report.compare("share of HOT updates of register", Spread([hot]), atLeast: 95, digits: 1, unit: " %")
    }

    private func calls(
        _ round: Int, _ database: Database, _ statement: String, _ values: (_ token: String, _ topic: Int) -> [String]
    ) throws -> Sample {
        let session = try database.session()
        let first = round * scale.calls
        let tokens = try session.texts(
            """
            SELECT \(workload.topic("i")) || ' ' || \(workload.token("i"))
            FROM generate_series(\(first)::bigint, \(first + scale.calls - 1)) AS i
            """
        ).map { line in
            let words = line.split(separator: " ").map(String.init)
            return values(words[1], Workload.topics.firstIndex(of: words[0]) ?? 0)
        }
        try session.run("CHECKPOINT")
        let client = try PreparedClient(database)
        try client.prepare("call", statement)
        for values in tokens.prefix(200) { try client.call("call", values) }
        let stopwatch = try Stopwatch(cluster)
        for values in tokens { try client.call("call", values) }
        return try stopwatch.sample(rows: tokens.count)
    }
}
