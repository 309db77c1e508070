import LedgerTestSupport

/// `make bench ONLY=scale`: what shards and routers cost. Its clusters and its page are its own.
struct ShardsMeasurement {
    let scale: Scale
    let report: Report
    /// Called after each part, so that an early end does not lose the earlier ones.
    let onEach: (_ figures: ShardFigures, _ fleet: ShardFleet) throws -> Void

    func run() throws {
        let fleet = try ShardFleet(scale)
        var figures = ShardFigures()
        report.attempt("drain", true) { figures.drain = try ShardedDrain(fleet: fleet, scale: scale).contest() }
        try onEach(figures, fleet)
        for call in ShardCall.all(scale) {
            report.attempt(call.name, true) {
                figures.calls.append(try ShardedCalls(call: call, fleet: fleet, scale: scale).contest())
            }
            try onEach(figures, fleet)
        }
        report.attempt("connections", true) { try connections(fleet) }
        figures.compare(report)
        try onEach(figures, fleet)
    }

    /// How many connections one session of a router holds to the shards.
    private func connections(_ fleet: ShardFleet) throws {
        for set in fleet.sets {
            func held() throws -> Int {
                try set.sessions.reduce(0) { sum, session in
                    sum
                        + Int(
                            try session.number(
                                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'a_sender'"
                            ))
                }
            }
            try eventually("earlier sessions have ended", within: 20) { try held() == 0 }
            let client = try PreparedClient(set.router, user: "a_sender")
            let tokens = try set.router.session().text(
                "SELECT array_agg(encode(sha256(i::text::bytea), 'hex')) FROM generate_series(1, 1000) AS i")
            try client.prepare("ask", "SELECT count(*) FROM tokenkeeper.sendable($1, '\(Workload.topics[0])')")
            try client.call("ask", [tokens ?? ""])
            let byProxy = try held()
            try client.prepare(
                "queue",
                "INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', t, '200' FROM unnest($1::text[]) AS t"
            )
            try client.call("queue", [tokens ?? ""])
            let both = try held()
            report.check(
                "connections to \(set.count) shard\(set.count == 1 ? "" : "s") that one session of the router holds after `sendable`; and after an INSERT as well",
                "\(byProxy); \(both)", target: "\(set.count); \(2 * set.count)",
                isReached: byProxy == set.count && both == 2 * set.count)
        }
    }
}

/// The figures of all rounds.
struct ShardFigures {
    var drain: ShardContest?
    var calls: [ShardContest] = []

    static let (fewest, most) = (ShardFleet.counts[0], ShardFleet.counts.last!)

    /// The bounds, by processor time.
    func compare(_ report: Report) {
        let sizes = "\(Self.most) shards over \(Self.fewest)"
        if let drain {
            report.compare(
                "drain: processor time a result, \(sizes)",
                drain.ratio((.straight, Self.most), over: (.straight, Self.fewest)), atMost: 1.1)
            report.compare(
                "the same, when the shards drain one after the other",
                drain.ratio((.straight, Self.most), .inTurn, over: (.straight, Self.fewest)), atMost: 1.1)
        }
        for call in calls {
            for way in ShardClient.Way.allCases {
                report.compare(
                    "\(call.contest.name), \(way.rawValue): processor time a \(call.unit), \(sizes)",
                    call.ratio((way, Self.most), over: (way, Self.fewest)), atMost: 1.1)
                guard call.contest.samples[ShardContest.name(way, Self.most, .inTurn)] != nil else { continue }
                report.compare(
                    "the same, when the shards are called one after the other",
                    call.ratio((way, Self.most), .inTurn, over: (way, Self.fewest)), atMost: 1.1)
            }
        }
    }

    /// The rate of so many shards, each on a machine like this one.
    ///
    /// Computed: the sum of their rates, each measured while the others had nothing to do.
    func computedDrain(_ count: Int) -> Double {
        (drain?.rate(.straight, count, .inTurn).median ?? .nan) * Double(count)
    }
}
