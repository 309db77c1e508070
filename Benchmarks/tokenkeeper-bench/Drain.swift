import Foundation
import LedgerTestSupport

/// The daemon's drain of a backlog, end to end: from the moment the daemon is resumed until the last result is counted.
struct Drain {
    let workload: Workload
    var daemons = 1
    var place = Place.past

    /// Where the backlog is.
    enum Place {
        /// In the partition before the current one, to which no sender writes any more.
        case past
        /// In the partition that senders write to at the moment.
        case current
        /// Half in each.
        case both
    }

    /// How often to read the count. The queue itself is not read: a reader of a partition gets in the daemon's way.
    private static let look: useconds_t = 5000

    /// - Parameter during: Called when the backlog is in place, before the daemons are resumed. Its result is kept until the end.
    func drain(
        _ positions: Range<Int>, deadEvery: Int, on database: Database, settings: [String] = MeasuredDaemon.brisk,
        during disturb: (_ partition: Partition) throws -> AnyObject? = { _ in nil }
    ) throws -> Sample {
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(daemons, on: database, settings: settings)
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.pause(daemons, on: session)
        let partition = try lay(positions, deadEvery: deadEvery, on: session)
        try session.run("CHECKPOINT")
        let before = try Self.counted(session)
        let disturbance = try disturb(partition)
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

    /// - Returns: The sealed partition.
    private func lay(_ positions: Range<Int>, deadEvery: Int, on session: Session) throws -> Partition {
        if place != .past {
            // The partition must stay current until the end: some 50,000 results are queued and drained per second.
            let left = try session.number("SELECT 128 - date_part('epoch', clock_timestamp())::bigint % 128")
            if left < min(5 + Double(positions.count) / 50_000, 100) { Thread.sleep(forTimeInterval: left + 0.5) }
        }
        let (past, current) = try (Partition.past(session), Partition.current(session))
        let parts: [(Partition, Range<Int>)] =
            switch place {
            case .past: [(past, positions)]
            case .current: [(current, positions)]
            case .both:
                [
                    (past, positions.lowerBound..<positions.lowerBound + positions.count / 2),
                    (current, positions.lowerBound + positions.count / 2..<positions.upperBound),
                ]
            }
        for (partition, part) in parts { try workload.queue(part, deadEvery: deadEvery, in: partition, on: session) }
        return past
    }

    static func counted(_ session: Session) throws -> Double {
        try session.number("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_count")
    }

    /// Reads the count until this many more results are counted.
    ///
    /// - Returns: When, and the rate in each quarter.
    static func follow(
        _ session: Session, from before: Double, rows: Int, isAlive: () -> Bool
    ) throws -> (end: ContinuousClock.Instant, quarters: [Double]) {
        let start = ContinuousClock.now
        var seen: [(rows: Double, seconds: Double)] = [(0, 0)]
        while true {
            let done = try counted(session) - before
            let now = ContinuousClock.now
            if done > (seen.last?.rows ?? 0) { seen.append((done, start.duration(to: now) / .seconds(1))) }
            if done >= Double(rows) {
                guard done == Double(rows) else { throw TestFailure("\(done) results counted, \(rows) queued") }
                return (now, quarters(of: rows, seen))
            }
            guard isAlive() else { throw TestFailure("the daemon has ended") }
            guard start.duration(to: now) < .seconds(1800) else {
                throw TestFailure("half an hour, and \(done) of \(rows) are drained")
            }
            usleep(look)
        }
    }

    /// Rows per second in each quarter of the rows, interpolated linearly between two readings.
    private static func quarters(of rows: Int, _ seen: [(rows: Double, seconds: Double)]) -> [Double] {
        let times = (0...4).map { quarter in
            let wanted = Double(rows * quarter) / 4
            let after = seen.firstIndex { $0.rows >= wanted } ?? seen.count - 1
            guard after > 0 else { return 0.0 }
            let (one, other) = (seen[after - 1], seen[after])
            return one.seconds + (other.seconds - one.seconds) * (wanted - one.rows) / (other.rows - one.rows)
        }
        return zip(times, times.dropFirst()).map { Double(rows) / 4 / max($1 - $0, 0.000001) }
    }
}
