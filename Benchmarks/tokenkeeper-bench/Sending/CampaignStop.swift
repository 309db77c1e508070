import Foundation
import LedgerTestSupport

/// How soon a pause and a cancellation take effect: from the COMMIT until the server has got the last request of the campaign.
struct CampaignStop {
    let scale: Scale
    let report: Report

    /// What the server is like, and how many daemons send to it.
    private struct Case {
        let name: String
        var daemons = 1
        var rate: Int?
        /// In seconds.
        var delay: Double?
        var streams = 1000
    }

    private static let cases = [
        Case(name: "at full speed"), Case(name: "by two daemons at full speed", daemons: 2),
        Case(name: "at 1000 per second", rate: 1000),
        // Ten times as many requests are claimed as can be in flight: those wait in the client.
        Case(name: "while responses take 500 ms, over connections with 50 streams", delay: 0.5, streams: 50),
    ]

    private static let changes = [(function: "pause_campaign", name: "pause"), ("cancel_campaign", "cancellation")]

    /// The instants of a change, and of what follows it.
    private struct Change {
        let name: String
        /// In milliseconds since 1970.
        let committedAt: Double
        var nextAt = Int64.max
    }

    func run(_ database: Database) throws {
        for one in Self.cases {
            let changes = try change(one, database)
            for (_, name) in Self.changes {
                let times = changes.filter { $0.name == name }.map(\.milliseconds)
                // Each of them is promised to be fast, not only the median.
                report.compare(
                    "from the COMMIT of a \(name) to the last request of the campaign at the fake, \(one.name): the longest",
                    Spread([times.max() ?? .nan]), atMost: 1000, digits: 0, unit: " ms")
                report.note("the same of each \(name), \(one.name)", Spread(times).text(0, unit: " ms"))
            }
        }
    }

    private func change(_ one: Case, _ database: Database) throws -> [(name: String, milliseconds: Double)] {
        let work = try SendingWork()
        try SendingServer(.validating, work).stop()
        let script = one.delay.map { #"{"rules": [{"match": {}, "answer": {"status": 200, "delay": \#($0)}}]}"# }
        let server = try SendingServer(
            .validating, work, script: script, logs: true, more: ["--maximum-streams", "\(one.streams)"])
        var changes: [Change] = []
        do {
            let daemons = try MeasuredDaemon.start(one.daemons, on: database, settings: work.daemonSettings(server))
            defer { for daemon in daemons { daemon.stop() } }
            let session = try database.session()
            for _ in 0..<scale.rounds {
                for (function, name) in Self.changes {
                    if !changes.isEmpty { changes[changes.count - 1].nextAt = Int64(Self.now()) }
                    changes.append(try stop(one, by: function, name, session))
                }
            }
        }
        _ = try server.stop()
        let arrivals = try server.arrivals()
        return changes.map { change in
            let last = Double(arrivals.last(before: change.nextAt) ?? 0)
            return (change.name, max(last - change.committedAt, 0))
        }
    }

    /// Begins a campaign, stops it at a random moment, and waits until nothing of it is claimed.
    private func stop(_ one: Case, by function: String, _ name: String, _ session: Session) throws -> Change {
        let rate = one.rate.map { ", max_per_second => \($0)" } ?? ""
        let campaign = Int(
            try session.number(
                "SELECT tokenkeeper.enqueue('\(SendingWork.payload)', '\(Workload.topics[0])', everyone => true, confirm => true\(rate))"
            ))
        try eventually("the campaign is sent", within: 60) {
            try session.number("SELECT accepted FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)") > 0
        }
        usleep(.random(in: 200_000...1_000_000))
        try session.run("SELECT tokenkeeper.\(function)(\(campaign))")
        let change = Change(name: name, committedAt: Self.now())
        try eventually("nothing is claimed", within: 60) {
            try session.number(
                """
                SELECT (SELECT count(*) FROM tokenkeeper.campaign_batch WHERE campaign_id = \(campaign) AND claimed_by IS NOT NULL)
                    + (SELECT count(*) FROM tokenkeeper.send_request WHERE campaign_id = \(campaign) AND claimed_by IS NOT NULL)
                """) == 0
        }
        try session.run("SELECT tokenkeeper.cancel_campaign(\(campaign))")
        try eventually("the campaign has ended", within: 60) {
            try session.text("SELECT ended_at IS NOT NULL FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)")
                == "t"
        }
        return change
    }

    private static func now() -> Double { Date.now.timeIntervalSince1970 * 1000 }
}
