/// The drain while something in the database is in its way, over the drain undisturbed: a backlog of which a half lies in the
/// current leaf, and a half in a past one.
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
                    ) { leaf in
                        try kind.map { try Disturbance($0, on: database, leaf: leaf) }
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
            let verdict = referee.verdict(kind.rawValue)
            report.compare(
                "drain while \(kind.rawValue), over undisturbed\(verdict)",
                contest.ratio(kind.rawValue, over: Self.undisturbed), atLeast: kind == .sleepingWriter ? nil : 0.6)
            report.compare(
                "drain while \(kind.rawValue): its last quarter over its first, each over the same undisturbed",
                fading(contest, kind.rawValue), atLeast: kind == .sleepingWriter ? nil : 0.9)
        }
        // The dump takes a core. Where there are but two, two connections have more to lose by that.
        let dumped = Disturbance.Kind.dump.rawValue + Self.one
        report.compare(
            "drain while \(dumped), over undisturbed\(Self.one)" + referee.verdict(dumped),
            contest.ratio(dumped, over: Self.undisturbed + Self.one))
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
