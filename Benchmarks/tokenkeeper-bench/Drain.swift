import Foundation
import LedgerTestSupport

/// The daemon's drain of a backlog, end to end: from the moment at which the daemon is let go until the last result is counted.
struct Drain {
    let workload: Workload
    var daemons = 1
    /// True to lay the backlog in the leaf that senders write to at the moment.
    var inCurrentLeaf = false

    /// How often the count is looked at. The queue itself is not: a reader of a leaf is in the daemon's way.
    private static let look: useconds_t = 5000

    /// - Parameter during: Called when all is laid, before the daemons are let go; what it answers is kept until the end.
    func drain(
        _ positions: Range<Int>, deadEvery: Int, on database: Database, settings: [String] = MeasuredDaemon.brisk,
        during disturb: (_ leaf: Leaf) throws -> AnyObject? = { _ in nil }
    ) throws -> Sample {
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(daemons, on: database, settings: settings)
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.pause(daemons, on: session)
        let leaf = try inCurrentLeaf ? Leaf.current(session) : Leaf.past(session)
        try workload.queue(positions, deadEvery: deadEvery, in: leaf, on: session)
        try session.run("CHECKPOINT")
        let before = try Self.counted(session)
        let disturbance = try disturb(leaf)
        let stopwatch = try Stopwatch(database.cluster, daemons)
        MeasuredDaemon.resume(daemons)
        let followed = try Self.follow(session, from: before, rows: positions.count) {
            daemons.allSatisfy { kill($0.pid, 0) == 0 }
        }
        var sample = try stopwatch.sample(rows: positions.count, end: followed.end)
        sample.quarters = followed.quarters
        withExtendedLifetime(disturbance) {}
        return sample
    }

    static func counted(_ session: Session) throws -> Double {
        try session.number("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_count")
    }

    /// Looks at the count until so many more are counted.
    ///
    /// - Returns: When, and the rate in each quarter.
    static func follow(
        _ session: Session, from before: Double, rows: Int, isAlive: () -> Bool
    ) throws -> (end: ContinuousClock.Instant, quarters: [Double]) {
        let start = ContinuousClock.now
        var marks: [(rows: Double, at: ContinuousClock.Instant)] = [(0, start)]
        while true {
            let done = try counted(session) - before
            let now = ContinuousClock.now
            while marks.count < 4, done >= Double(rows * marks.count) / 4 { marks.append((done, now)) }
            if done >= Double(rows) {
                guard done == Double(rows) else { throw TestFailure("\(done) results counted, \(rows) queued") }
                marks.append((done, now))
                let quarters = zip(marks, marks.dropFirst()).map { first, second in
                    (second.rows - first.rows) / max(first.at.duration(to: second.at) / .seconds(1), 0.000001)
                }
                return (now, quarters)
            }
            guard isAlive() else { throw TestFailure("the daemon has ended") }
            guard start.duration(to: now) < .seconds(1800) else {
                throw TestFailure("half an hour, and \(done) of \(rows) are drained")
            }
            usleep(look)
        }
    }
}
