import LedgerTestSupport

/// The cost for senders: inserting into the queue compared with a plain table with the same columns and no index.
struct ProducerMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let tables = [("queue", "tokenkeeper.send_result"), ("plain table", "plain")]
    private static let columns = "topic, token, status, body, sent_at"

    func run() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        try session.run(
            """
            CREATE TABLE plain (environment text DEFAULT 'production', topic text, token text, status text, body text,
                                apns_id text, sent_at timestamptz, queued_at timestamptz NOT NULL DEFAULT clock_timestamp())
            """)
        let many = scale.inserts * 10
        let file = "\(cluster.cluster.folder)/results.tsv"
        try session.run(
            "COPY (SELECT \(Self.columns) FROM (\(workload.results(0..<many, deadEvery: 50))) AS r) TO '\(file)'")
        let rows = try session.texts("SELECT token FROM (\(workload.results(0..<scale.inserts, deadEvery: 50))) AS r")
        let contest = try Contest(
            "producers", rounds: scale.rounds,
            Self.tables.map { name, table in
                Contest.Contestant(name: "single rows, \(name)") { _ in
                    try onEmpty(session) {
                        let client = try PreparedClient(database)
                        try client.prepare(
                            "insert",
                            "INSERT INTO \(table) (\(Self.columns)) VALUES ($1, $2, $3, $4, $5::timestamptz)")
                        let stopwatch = try Stopwatch(cluster)
                        for (n, token) in rows.enumerated() {
                            let body = n % 50 == 0 ? #"{"reason":"Unregistered","timestamp":1794000000123}"# : ""
                            try client.call(
                                "insert",
                                [
                                    Workload.topics[n % 3], token, n % 50 == 0 ? "410" : "200", body,
                                    "2026-11-06 20:00:00Z",
                                ])
                        }
                        return try stopwatch.sample(rows: rows.count)
                    }
                }
            }
                + Self.tables.map { name, table in
                    Contest.Contestant(name: "COPY, \(name)") { _ in
                        try onEmpty(session) {
                            let stopwatch = try Stopwatch(cluster)
                            try session.run("COPY \(table) (\(Self.columns)) FROM '\(file)'")
                            return try stopwatch.sample(rows: many)
                        }
                    }
                })
        report.add(contest)
        report.compare(
            "single rows into the queue over a plain unindexed table",
            contest.ratio("single rows, queue", over: "single rows, plain table"), atLeast: 0.85)
        report.compare(
            "COPY into the queue over a plain unindexed table",
            contest.ratio("COPY, queue", over: "COPY, plain table"), atLeast: 0.8)
    }

    private func onEmpty(_ session: Session, _ work: () throws -> Sample) throws -> Sample {
        try session.run("TRUNCATE plain, tokenkeeper.send_result")
        try session.run("CHECKPOINT")
        return try work()
    }
}
