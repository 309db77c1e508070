import Foundation
import LedgerTestSupport

/// What the same call costs straight to the shards and through a router, with each number of shards.
struct ShardedCalls {
    let call: ShardCall
    let fleet: ShardFleet
    let scale: Scale

    func contest() throws -> ShardContest {
        var contestants: [Contest.Contestant] = []
        for way in ShardClient.Way.allCases {
            for set in fleet.sets {
                for order in orders(way, set) {
                    let client = try ShardClient(way, set, call)
                    contestants.append(
                        Contest.Contestant(name: ShardContest.name(way, set.count, order)) { round in
                            try perform(round, client, way, set, order)
                        })
                }
            }
        }
        return ShardContest(contest: try Contest(call.name, rounds: scale.rounds, contestants), unit: call.unit)
    }

    /// With most shards, also one after the other. COPY straight to the shards is that already.
    private func orders(_ way: ShardClient.Way, _ set: ShardSet) -> [ShardOrder] {
        if case (.copy, .straight) = (call.kind, way) { return [.together] }
        return set.count == ShardFleet.counts.last! ? [.together, .inTurn] : [.together]
    }

    private func perform(
        _ round: Int, _ client: ShardClient, _ way: ShardClient.Way, _ set: ShardSet, _ order: ShardOrder
    ) throws -> Sample {
        let warmups = warmups(set)
        var rows = try rows(call.rows(scale, way) + warmups / set.count, round, set)
        if order == .inTurn {
            rows = rows.prefix(warmups) + rows.dropFirst(warmups).sorted { $0.shard < $1.shard }
        }
        for session in set.sessions { try session.run("TRUNCATE tokenkeeper.send_result") }
        try set.settle()
        let (warm, timed) = (rows.prefix(warmups), rows.dropFirst(warmups))
        // Straight to the shards, a sender collects the rows of a large call for each shard.
        let batches = way == .straight && order == .together ? set.count : 1
        try perform(warm, client, batches)
        let stopwatch = try ShardStopwatch(fleet, set)
        try perform(timed, client, batches)
        let sample = try stopwatch.sample(rows: timed.count)
        if call.statement.contains("send_result") {
            let queued = try set.sessions.reduce(0) {
                $0 + (try $1.number("SELECT count(*) FROM tokenkeeper.send_result"))
            }
            guard Int(queued) == rows.count else { throw TestFailure("\(queued) of \(rows.count) results are queued") }
        }
        return sample
    }

    /// Rows that come before those that are timed. They open the connections and make the plans of the session.
    private func warmups(_ set: ShardSet) -> Int {
        switch call.kind {
        case .prepared(1, _): 50 * set.count
        case .prepared(let batch, _): 8 * batch * set.count
        case .copy: 8 * set.count
        }
    }

    /// - Parameter batches: How many large calls are prepared at the same time.
    private func perform(_ rows: ArraySlice<ShardRow>, _ client: ShardClient, _ batches: Int) throws {
        switch call.kind {
        case .copy(let line): try client.copy(call.statement, rows, line)
        case .prepared(let batch, let values):
            let together = batch == 1 ? 1 : batch * batches
            for first in stride(from: rows.startIndex, to: rows.endIndex, by: together) {
                try client.call(rows[first..<min(first + together, rows.endIndex)], values)
            }
        }
    }

    /// Equally many tokens of each shard, mixed, in a different order in each round.
    private func rows(_ each: Int, _ round: Int, _ set: ShardSet) throws -> [ShardRow] {
        try set.sessions.enumerated().flatMap { shard, session in
            let texts = try session.texts(
                """
                SELECT topic || ' ' || token FROM own WHERE \(call.which) ORDER BY hashint8extended(n, \(round)) LIMIT \(each)
                """)
            if texts.isEmpty { throw TestFailure("shard \(shard) has no such tokens") }
            return (0..<each).map { index in
                let words = texts[index % texts.count].split(separator: " ")
                return ShardRow(shard: shard, topic: String(words[0]), token: String(words[1]))
            }
        }.shuffled()
    }
}

/// The figures of one kind of work, by way and number of shards.
struct ShardContest {
    let contest: Contest
    let unit: String

    static func name(_ way: ShardClient.Way, _ count: Int, _ order: ShardOrder) -> String {
        "\(way.rawValue), \(count)" + (order == .inTurn ? ", one after the other" : "")
    }

    func rate(_ way: ShardClient.Way, _ count: Int, _ order: ShardOrder = .together) -> Spread {
        contest.rate(Self.name(way, count, order))
    }

    /// Microseconds of processor time for each row.
    func cost(
        _ way: ShardClient.Way, _ count: Int, _ part: KeyPath<Sample, Double>, _ order: ShardOrder = .together
    ) -> Spread {
        contest.cpu(Self.name(way, count, order), part)
    }

    /// How many times as much processor time a row takes, round by round.
    func ratio(
        _ one: (ShardClient.Way, Int), _ order: ShardOrder = .together, over other: (ShardClient.Way, Int)
    ) -> Spread {
        func costs(_ which: (ShardClient.Way, Int), _ order: ShardOrder) -> [Double] {
            (contest.samples[Self.name(which.0, which.1, order)] ?? []).map { $0.allSeconds / Double($0.rows) }
        }
        return Spread(zip(costs(one, order), costs(other, .together)).map { $0 / $1 })
    }
}
