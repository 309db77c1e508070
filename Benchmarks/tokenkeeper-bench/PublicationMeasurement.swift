/// The drain while everything is published for logical replication and a slot is open, on a separate cluster.
struct PublicationMeasurement {
    let scale: Scale
    let report: Report

    private static let plain = "without a publication"
    private static let published = "FOR ALL TABLES"

    func run() throws {
        let cluster = try PrivateCluster(
            more: ["wal_level=logical", "max_wal_senders=4", "max_replication_slots=4"], sharedBuffersInMB: 1024)
        let workload = Workload(tokens: min(scale.tokens, 1_000_000))
        let template = try cluster.template(workload)
        let referee = Referee(reference: Self.plain)
        func contestant(_ name: String, publishes: Bool) -> Contest.Contestant {
            Contest.Contestant(name: name) { round in
                let database = try cluster.copy(of: template)
                defer { try? database.drop() }
                let session = try database.session()
                if publishes {
                    try session.run("CREATE PUBLICATION everything FOR ALL TABLES")
                    try session.run("SELECT pg_create_logical_replication_slot('bench', 'pgoutput')")
                }
                let sample = try Drain(workload: workload, place: .both)
                    .drain(0..<scale.results, deadEvery: scale.deadEvery[0], on: database)
                try referee.note(name, round: "\(round + 1)", session)
                if publishes { try session.run("SELECT pg_drop_replication_slot('bench')") }
                return sample
            }
        }
        let contest = try Contest(
            "\(Scale.short(scale.results)) results, wal_level=logical", rounds: scale.rounds,
            [contestant(Self.plain, publishes: false), contestant(Self.published, publishes: true)])
        report.add(contest)
        report.compare(
            "drain with a publication FOR ALL TABLES and a slot that nobody reads, over none, wal_level=logical both",
            contest.ratio(Self.published, over: Self.plain), verdict: referee.verdict(Self.published))
    }
}
