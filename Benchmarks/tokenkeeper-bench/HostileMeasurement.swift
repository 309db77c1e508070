/// The drain while something in the database is in its way, over the drain undisturbed: a backlog of which a half lies in the
/// current leaf, and a half in a past one.
struct HostileMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let undisturbed = "undisturbed"

    func run() throws {
        let deadEvery = scale.deadEvery[0]
        let results = scale.manyResults * 2 / 5
        let referee = Referee(reference: Self.undisturbed)
        func contestant(_ name: String, _ kind: Disturbance.Kind?) -> Contest.Contestant {
            Contest.Contestant(name: name) { round in
                let database = try cluster.copy(of: template)
                defer { try? database.drop() }
                let sample = try Drain(workload: workload, place: .both)
                    .drain(0..<results, deadEvery: deadEvery, on: database) { leaf in
                        try kind.map { try Disturbance($0, on: database, leaf: leaf) }
                    }
                try referee.note(name, round: "\(round + 1)", database.session())
                return sample
            }
        }
        let contest = try Contest(
            "\(Scale.short(results)) results, \(Scale.percent(deadEvery)) 410s, hostile conditions",
            rounds: scale.rounds,
            [contestant(Self.undisturbed, nil)] + Disturbance.Kind.allCases.map { contestant($0.rawValue, $0) })
        report.add(contest)
        for kind in Disturbance.Kind.allCases {
            let verdict = referee.verdict(kind.rawValue)
            report.compare(
                "drain while \(kind.rawValue), over undisturbed\(verdict)",
                contest.ratio(kind.rawValue, over: Self.undisturbed), atLeast: kind == .sleepingWriter ? nil : 0.6)
            report.compare(
                "drain while \(kind.rawValue): its last quarter over its first, each over the same undisturbed",
                fading(contest, kind.rawValue), atLeast: kind == .sleepingWriter ? nil : 0.9)
        }
    }

    private func fading(_ contest: Contest, _ name: String) -> Spread {
        let pairs = zip(contest.samples[name] ?? [], contest.samples[Self.undisturbed] ?? [])
        return Spread(
            pairs.map { disturbed, undisturbed in
                let ratios = zip(disturbed.quarters, undisturbed.quarters).map { $0 / $1 }
                return (ratios.last ?? .nan) / (ratios.first ?? .nan)
            })
    }
}
