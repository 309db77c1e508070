import Foundation
import LedgerTestSupport

/// Problems of large installations: sizes at which something was once slow or stuck. Each case has a file in this folder, with a
/// function of this type that gets its own database, and a line in `cases`.
struct ExtremesMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report

    private var cases: [(name: String, measure: (Database) throws -> Void)] {
        [
            ("never-registered tokens", neverRegistered), ("many topics", manyTopics), ("reinstate", reinstate),
            ("a crowded device", crowdedDevice), ("status", status), ("erasure", erasure),
            ("counts of results", resultCounts),
        ]
    }

    func run() {
        for (name, measure) in cases {
            report.attempt("extremes: \(name)", true) {
                let database = try cluster.copy(of: "bare")
                defer { try? database.drop() }
                Progress.say("extremes: \(name)")
                try measure(database)
            }
        }
    }

    /// A size of the full run, or a small part of it.
    func size(_ full: Int) -> Int { full / scale.fleetDivisor }

    /// Waits until nothing is queued.
    ///
    /// - Returns: How long that took, in seconds; nil if something is still queued after `most`.
    func untilQueueIsEmpty(_ session: Session, most: Duration = .seconds(120)) throws -> Double? {
        let start = ContinuousClock.now
        while try session.number("SELECT count(*) FROM tokenkeeper.send_result") > 0 {
            if start.duration(to: .now) > most { return nil }
            usleep(5000)
        }
        return start.duration(to: .now) / .seconds(1)
    }

    /// Reports how long a queue took to become empty.
    func report(_ measure: String, _ seconds: Double?, target: Double) {
        report.check(
            measure, seconds.map { String(format: "%.2f s", $0) } ?? "still there after two minutes",
            target: "at most \(target) s", isReached: seconds.map { $0 <= target } ?? false)
    }

    /// The bodies of suspects.
    static let badToken = #"{"reason":"BadDeviceToken"}"#
}
