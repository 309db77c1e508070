import Foundation
import LedgerTestSupport

/// The drain of shards: each has the same backlog and its own daemon, and they drain at the same time or one after the other.
struct ShardedDrain {
    let fleet: ShardFleet
    let scale: Scale

    private static let deadEvery = 50

    func contest() throws -> ShardContest {
        let contest = try Contest(
            "drain", rounds: scale.rounds,
            fleet.sets.flatMap { set in
                (set.count == 1 ? [ShardOrder.together] : [.together, .inTurn]).map { order in
                    Contest.Contestant(name: ShardContest.name(.straight, set.count, order)) { round in
                        // Other tokens each time.
                        try drain(round * 2 + (order == .inTurn ? 1 : 0), set, order)
                    }
                }
            })
        return ShardContest(contest: contest, unit: "result")
    }

    private func drain(_ part: Int, _ set: ShardSet, _ order: ShardOrder) throws -> Sample {
        var daemons: [MeasuredDaemon] = []
        defer { for daemon in daemons { daemon.stop() } }
        for (shard, session) in zip(set.shards, set.sessions) {
            let started = try MeasuredDaemon.start(
                on: shard, settings: MeasuredDaemon.brisk + ["shards.map=\(set.map)"])
            daemons += started
            try MeasuredDaemon.pause(started, on: session)
            try queue(part, session)
        }
        try set.settle()
        let before = try set.sessions.map(Drain.counted)
        let stopwatch = try ShardStopwatch(fleet, set, daemons)
        let turns = order == .together ? [Array(0..<set.count)] : (0..<set.count).map { [$0] }
        for shards in turns {
            MeasuredDaemon.resume(shards.map { daemons[$0] })
            try wait(for: shards, daemons, set, before)
        }
        return try stopwatch.sample(rows: scale.shardResults * set.count)
    }

    /// The backlog of one shard, in a sealed partition. Each 410 concerns another active token.
    private func queue(_ part: Int, _ session: Session) throws {
        let partition = try Partition.past(session)
        let first = part * scale.shardResults
        guard (first + scale.shardResults) / Self.deadEvery <= scale.shardTokens / 2 else {
            throw TestFailure("not enough tokens for the 410s")
        }
        try session.run(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at, partition_number)
            SELECT 'production', o.topic, o.token, CASE WHEN i % \(Self.deadEvery) = 0 THEN 410 ELSE 200 END,
                   CASE WHEN i % \(Self.deadEvery) = 0 THEN '{"reason":"Unregistered","timestamp":' || \(Workload.base) + i || '}' END,
                   to_timestamp((\(Workload.base) + i) / 1000), \(partition.number)
            FROM generate_series(\(first)::bigint, \(first + scale.shardResults - 1)) AS i
            JOIN own AS o ON o.place = CASE WHEN i % \(Self.deadEvery) = 0 THEN i / \(Self.deadEvery) ELSE i % \(scale.shardTokens / 2) END
            """)
        try session.run("ANALYZE \(partition.table)")
    }

    /// Waits until everything of these shards is counted. Looks at one shard at a time, so that the looking costs as much for a row, however many shards there are.
    private func wait(for shards: [Int], _ daemons: [MeasuredDaemon], _ set: ShardSet, _ before: [Double]) throws {
        let start = ContinuousClock.now
        var left = shards
        while let shard = left.first {
            let done = try Drain.counted(set.sessions[shard]) - before[shard]
            left.removeFirst()
            if done < Double(scale.shardResults) { left.append(shard) }
            guard done <= Double(scale.shardResults) else { throw TestFailure("\(done) results are counted") }
            guard start.duration(to: .now) < .seconds(1800) else {
                throw TestFailure("half an hour, and \(done) are drained; \(daemons[shard].logged)")
            }
            usleep(5000)
        }
    }
}
