/// The drain under a disturbance, compared with the undisturbed drain: half of the backlog is in the current partition, half in a
/// sealed one.
struct HostileMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let undisturbed = "undisturbed"
    private static let one = ", one connection"

    func run() throws {
        let deadEvery = scale.deadEvery[0]
        let results = scale.manyResults / 5
        let referee = Referee(reference: Self.undisturbed)
        func contestant(_ kind: Disturbance.Kind?, isAlone: Bool = false) -> Contest.Contestant {
            let name = (kind?.rawValue ?? Self.undisturbed) + (isAlone ? Self.one : "")
            return Contest.Contestant(name: name) { round in
                let database = try cluster.copy(of: template)
                defer { try? database.drop() }
                let sample = try Drain(workload: workload, place: .both)
                    .drain(
                        0..<results, deadEvery: deadEvery, on: database,
                        settings: isAlone ? MeasuredDaemon.briskAlone : MeasuredDaemon.brisk
                    ) { partition in
                        try kind.map { try Disturbance($0, on: database, partition: partition) }
                    }
                try referee.note(name, round: "\(round + 1)", database.session())
                return sample
            }
        }
        let contest = try Contest(
            "\(Scale.short(results)) results, \(Scale.percent(deadEvery)) 410s, hostile conditions",
            rounds: scale.rounds,
            [contestant(nil), contestant(nil, isAlone: true), contestant(.dump, isAlone: true)]
                + Disturbance.Kind.allCases.map { contestant($0) })
        report.add(contest)
        for kind in Disturbance.Kind.allCases {
            report.compare(
                "drain while \(kind.rawValue), over undisturbed",
                contest.ratio(kind.rawValue, over: Self.undisturbed), atLeast: kind == .sleepingWriter ? nil : 0.6,
                verdict: referee.verdict(kind.rawValue))
        }
        // The dump takes a core. On two cores, two connections lose more by that.
        let dumped = Disturbance.Kind.dump.rawValue + Self.one
        report.compare(
            "drain while \(dumped), over undisturbed\(Self.one)",
            contest.ratio(dumped, over: Self.undisturbed + Self.one), verdict: referee.verdict(dumped))
        try fading()
    }

    /// Whether the drain slows down over time: in the current partition, where rows are deleted and nothing is truncated.
    private func fading() throws {
        let deadEvery = scale.deadEvery[0]
        let kinds: [Disturbance.Kind] = [.oldSnapshot, .dump]
        let contest = try Contest(
            "\(Scale.short(scale.results)) results, \(Scale.percent(deadEvery)) 410s, current partition, hostile conditions",
            rounds: scale.rounds,
            ([nil] + kinds).map { (kind: Disturbance.Kind?) in
                Contest.Contestant(name: kind?.rawValue ?? Self.undisturbed) { round in
                    let database = try cluster.copy(of: template)
                    defer { try? database.drop() }
                    let first = round * scale.results
                    return try Drain(workload: workload, place: .current).drain(
                        first..<first + scale.results, deadEvery: deadEvery, on: database
                    ) { partition in
                        try kind.map { try Disturbance($0, on: database, partition: partition) }
                    }
                }
            })
        report.add(contest)
        for kind in kinds {
            let pairs = zip(contest.samples[kind.rawValue] ?? [], contest.samples[Self.undisturbed] ?? [])
            report.compare(
                "drain of the current partition while \(kind.rawValue): the last quarter's rate over the first's, over the same undisturbed",
                Spread(pairs.map { $0.lastOverFirst / $1.lastOverFirst }), atLeast: 0.9)
        }
    }
}
