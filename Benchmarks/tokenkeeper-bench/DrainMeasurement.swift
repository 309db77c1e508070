/// The drain compared with the floor and the peers: all in the same rounds, each on a fresh copy of the same ledger.
struct DrainMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload
    var withPeers: Bool

    static let floor = "floor"
    static let upsert = "bare upsert"
    static let daemon = "tokenkeeperd"
    static let one = "tokenkeeperd, one connection"
    static let two = "two tokenkeeperd"
    static let current = "tokenkeeperd, current partition"

    func run() {
        for deadEvery in scale.deadEvery {
            report.attempt("drain, \(Scale.percent(deadEvery)) 410s", true) { try contest(deadEvery) }
        }
    }

    private func contest(_ deadEvery: Int) throws {
        let referee = Referee(reference: Self.floor)
        let results = scale.results(deadEvery)
        let share = Scale.percent(deadEvery)
        let work = "\(Scale.short(results)) results, \(share) 410s, \(Scale.short(workload.tokens)) tokens"
        var contestants: [Contest.Contestant] = [
            contestant(Self.floor, results, referee) {
                try Floor(workload: workload).drain($0, deadEvery: deadEvery, on: $1)
            },
            contestant(Self.daemon, results, referee) {
                try Drain(workload: workload).drain($0, deadEvery: deadEvery, on: $1)
            },
            contestant(Self.one, results, referee) {
                try Drain(workload: workload).drain(
                    $0, deadEvery: deadEvery, on: $1, settings: MeasuredDaemon.briskAlone)
            },
            contestant(Self.upsert, results, nil) {
                try Floor(workload: workload, records: false).drain($0, deadEvery: deadEvery, on: $1)
            },
        ]
        if deadEvery == scale.deadEvery[0] {
            contestants += [
                contestant(Self.two, results, referee) {
                    try Drain(workload: workload, daemons: 2).drain($0, deadEvery: deadEvery, on: $1)
                },
                contestant(Self.current, results, referee) {
                    try Drain(workload: workload, place: .current).drain($0, deadEvery: deadEvery, on: $1)
                },
            ]
        }
        let peers = withPeers ? try calibrated(deadEvery) : []
        contestants += peers.map { peer in
            contestant(peer.name, results, referee) { try peer.drain($0, deadEvery: deadEvery, on: $1) }
        }
        let contest = try Contest(work, rounds: scale.rounds, contestants)
        report.add(contest)
        conclude(contest, deadEvery, peers, referee)
    }

    private func conclude(_ contest: Contest, _ deadEvery: Int, _ peers: [any Peer], _ referee: Referee) {
        let share = Scale.percent(deadEvery)
        func compare(_ measure: String, _ one: String, over other: String, atLeast least: Double? = nil) {
            report.compare(
                measure, contest.ratio(one, over: other), atLeast: least,
                verdict: referee.verdict(one) ?? referee.verdict(other))
        }
        let drain = "drain of a backlog, \(share) 410s"
        let alone = "the same with drain.second_connection=off"
        compare(
            "\(drain), over the floor", Self.daemon, over: Self.floor, atLeast: deadEvery == 5 ? nil : 0.8)
        compare(alone, Self.one, over: Self.floor)
        compare(
            "\(drain), over a bare bulk upsert of the ledger alone (no history, no counts)", Self.daemon,
            over: Self.upsert, atLeast: deadEvery == 1 ? 0.8 : nil)
        for peer in peers {
            compare(
                "\(drain), over \(peer.name), batches of \(peer.batch)", Self.daemon, over: peer.name,
                atLeast: peer.target)
            compare(alone, Self.one, over: peer.name)
        }
        if contest.contestants.contains(Self.two) {
            compare("two daemons over one", Self.two, over: Self.daemon)
            for other in [Self.floor] + peers.map(\.name) {
                compare("drain of the current partition, \(share) 410s, over \(other)", Self.current, over: other)
            }
        }
        report.bars.append(
            (
                "\(share) 410s",
                ([Self.floor, Self.daemon, Self.one] + peers.map(\.name)).map { ($0, contest.rate($0).median) }
            ))
    }

    /// The peers, each with the batch size at which it is fastest.
    private func calibrated(_ deadEvery: Int) throws -> [any Peer] {
        try [SkipLockedQueue.self, PgmqCycle.self, PgQQueue.self].map { (kind: any Peer.Type) in
            if scale.batches.count == 1 { return kind.init(workload: workload, batch: scale.batches[0]) }
            let tried = try scale.batches.map { batch in
                let peer = kind.init(workload: workload, batch: batch)
                let sample = try onCopy {
                    try peer.drain(0..<scale.results(deadEvery) / 4, deadEvery: deadEvery, on: $0)
                }
                Progress.say("calibration: \(peer.name), batches of \(batch): \(Int(sample.rate)) a second")
                return (peer, sample.rate)
            }
            return tried.max { $0.1 < $1.1 }!.0
        }
    }

    private func contestant(
        _ name: String, _ results: Int, _ referee: Referee?,
        _ drain: @escaping (Range<Int>, Database) throws -> Sample
    ) -> Contest.Contestant {
        Contest.Contestant(name: name) { round in
            try onCopy { database in
                let first = round * results
                let sample = try drain(first..<first + results, database)
                try referee?.note(name, round: "\(round + 1)", database.session())
                return sample
            }
        }
    }

    private func onCopy<Value>(_ work: (Database) throws -> Value) throws -> Value {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        return try work(database)
    }
}
