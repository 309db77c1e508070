import LedgerTestSupport

/// The drain over the large ledger compared with the drain over the usual one: the number of tokens should not matter.
struct LargeLedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let templates: (usual: String, large: String)
    let workloads: (usual: Workload, large: Workload)

    private static let usual = "tokenkeeperd, usual ledger"
    private static let large = "tokenkeeperd, large ledger"
    private static let floor = "floor, large ledger"

    func run() throws {
        let deadEvery = scale.deadEvery[0]
        let database = try cluster.copy(of: templates.large)
        defer { try? database.drop() }
        var drained = 0
        // Both have slices of one copy: two would not fit into memory together.
        func slice() -> Range<Int> {
            defer { drained += scale.results }
            return drained..<drained + scale.results
        }
        let contest = try Contest(
            "\(Scale.short(scale.results)) results, \(Scale.percent(deadEvery)) 410s, \(Scale.short(workloads.large.tokens)) tokens",
            rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.usual) { round in
                    let small = try cluster.copy(of: templates.usual)
                    defer { try? small.drop() }
                    let first = round * scale.results
                    return try Drain(workload: workloads.usual)
                        .drain(first..<first + scale.results, deadEvery: deadEvery, on: small)
                },
                Contest.Contestant(name: Self.large) { _ in
                    try Drain(workload: workloads.large).drain(slice(), deadEvery: deadEvery, on: database)
                },
                Contest.Contestant(name: Self.floor) { _ in
                    try Floor(workload: workloads.large).drain(slice(), deadEvery: deadEvery, on: database)
                },
            ])
        let stale = try database.session().number("SELECT count(*) FROM tokenkeeper.ledger WHERE stale_at IS NOT NULL")
        let expected = workloads.large.stale + drained / deadEvery
        guard Int(stale) == expected else {
            throw TestFailure("\(Int(stale)) dead tokens in the large ledger, expected \(expected)")
        }
        report.add(contest)
        report.compare(
            "drain over \(Scale.short(workloads.large.tokens)) tokens over \(Scale.short(workloads.usual.tokens))",
            contest.ratio(Self.large, over: Self.usual), atLeast: 0.85)
        report.compare(
            "drain over \(Scale.short(workloads.large.tokens)) tokens, \(Scale.percent(deadEvery)) 410s, over the floor",
            contest.ratio(Self.large, over: Self.floor), atLeast: 0.8)
    }
}
