import Foundation
import LedgerTestSupport

extension ExtremesMeasurement {
    /// A sweep when the counts of 80 days have never been added up: 3,000 topics, with several rows per hour and topic.
    func resultCounts(_ database: Database) throws {
        let session = try database.session()
        let rows = size(18_000_000)
        try session.run(
            """
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
            SELECT date_trunc('hour', now()) - (i % 1920) * interval '1 hour', 'production', 't' || (i / 1920 % 3000), 200, 1
            FROM generate_series(1, \(rows)) AS i
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.result_count")
        let daemons = try MeasuredDaemon.start(on: database)
        defer { for daemon in daemons { daemon.stop() } }
        let start = ContinuousClock.now
        let run = try session.number("SELECT tokenkeeper.request_sweep()")
        let ended = "SELECT count(*) FROM tokenkeeper.sweep_run WHERE run_id = \(Int(run)) AND finished_at IS NOT NULL"
        while try session.number(ended) == 0 {
            if start.duration(to: .now) > .seconds(1800) {
                throw TestFailure("the sweep has not ended within half an hour")
            }
            usleep(50_000)
        }
        let took = String(format: "%.1f s", start.duration(to: .now) / .seconds(1))
        let finished = try session.number(
            "SELECT count(*) FROM tokenkeeper.sweep_run WHERE run_id = \(Int(run)) AND outcome = 'finished'")
        report.check(
            "a sweep that adds up \(Scale.short(rows)) rows of counts", finished == 1 ? took : "failed after \(took)",
            target: "finished", isReached: finished == 1)
    }
}
