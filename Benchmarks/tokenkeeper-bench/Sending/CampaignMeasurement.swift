import Foundation
import LedgerTestSupport

/// Campaigns on the large ledger: how long it takes to address a few of many, when the first push leaves, how well daemons keep a rate,
/// and how soon a campaign stops.
struct CampaignMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    /// Requests per second.
    private static let rates = [100, 5000]

    private var tokens: String { Scale.short(workload.tokens) }

    func run() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        try address(database)
        try send(database)
        for rate in Self.rates { try keep(rate, database) }
        try CampaignStop(scale: scale, report: report).run(database)
        // In memory, nothing is left but what the operating system keeps.
        cluster.cluster.stop(mode: "fast")
        try cluster.cluster.start()
        try send(database, afterRestart: true)
        try address(database, hasStatistics: false)
    }

    /// Addresses one token in a thousand, without a daemon.
    ///
    /// - Parameter hasStatistics: Whether the planner knows the ledger: not between an import and the next ANALYZE.
    private func address(_ database: Database, hasStatistics: Bool = true) throws {
        if !hasStatistics {
            try database.session().run(
                """
                DELETE FROM pg_statistic WHERE starelid IN ('tokenkeeper.ledger'::regclass, 'tokenkeeper.ledger_tags'::regclass);
                UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE oid = 'tokenkeeper.ledger'::regclass
                """)
        }
        let session = try database.session()
        // The session may not have reported earlier transactions yet: only the difference counts.
        func scans() throws -> [Double] {
            try ["ledger_tags", "ledger_pkey"].map {
                try session.number("SELECT pg_stat_get_xact_numscans('tokenkeeper.\($0)'::regclass)")
            }
        }
        var milliseconds: [Double] = []
        var (addressed, plans) = (0, Set<String>())
        for _ in 0..<scale.rounds {
            addressed = 0
            var total = 0.0
            for topic in Workload.topics {
                let campaign = try enqueue(topic, "tags => '\(Workload.rareTag)'", on: session)
                try session.run("BEGIN")
                let before = try scans()
                let start = ContinuousClock.now
                addressed += Int(try session.number("SELECT tokenkeeper.address_campaign(\(campaign), 1000000)"))
                let time = start.duration(to: .now)
                let after = try scans()
                try session.run("COMMIT")
                total += time / .milliseconds(1)
                plans.insert(zip(after, before).map(-) == [1, 0] ? "ledger_tags" : "another plan")
                guard
                    try session.text("SELECT is_addressed FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)")
                        == "t"
                else { throw TestFailure("one call has not addressed the whole audience") }
                try session.run("SELECT tokenkeeper.cancel_campaign(\(campaign))")
            }
            milliseconds.append(total)
        }
        let unknown = hasStatistics ? "" : ", without statistics"
        report.compare(
            "to address \(addressed) tokens, one in a thousand of \(tokens)\(unknown)", Spread(milliseconds),
            atMost: 1000, digits: 0, unit: " ms")
        report.check(
            "the index of that\(unknown)", plans.sorted().joined(separator: ", "), target: "ledger_tags",
            isReached: plans == ["ledger_tags"])
    }

    /// Measures how long a push to everyone on a topic takes to leave.
    private func send(_ database: Database, afterRestart: Bool = false) throws {
        let work = try SendingWork()
        try SendingServer(.validating, work).stop()
        let server = try SendingServer(.validating, work)
        defer { _ = try? server.stop() }
        let daemons = try MeasuredDaemon.start(
            on: database, settings: work.daemonSettings(server))
        defer { for daemon in daemons { daemon.stop() } }
        let session = try database.session()
        var milliseconds: [Double] = []
        for _ in 0..<(afterRestart ? 1 : scale.rounds) {
            let start = ContinuousClock.now
            let campaign = try enqueue(Workload.topics[0], "everyone => true, confirm => true", on: session)
            let endings = "SELECT count(*) FROM tokenkeeper.campaign_ending WHERE campaign_id = \(campaign)"
            while try session.number(endings) == 0 { usleep(2000) }
            milliseconds.append(start.duration(to: .now) / .milliseconds(1))
            try session.run("SELECT tokenkeeper.cancel_campaign(\(campaign))")
            try eventually("the campaign has ended", within: 60) {
                try session.text(
                    "SELECT ended_at IS NOT NULL FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)") == "t"
            }
        }
        report.compare(
            "from the call of enqueue until the first response is written, everyone on a topic of \(tokens) tokens"
                + (afterRestart ? ", after a restart of PostgreSQL" : ""),
            Spread(milliseconds), atMost: 200, digits: 0, unit: " ms")
    }

    /// Lets three daemons send a campaign by a rate for 13 seconds, and counts at the fake.
    private func keep(_ rate: Int, _ database: Database) throws {
        let work = try SendingWork()
        try SendingServer(.validating, work).stop()
        let server = try SendingServer(.validating, work, logs: true)
        do {
            let daemons = try MeasuredDaemon.start(3, on: database, settings: work.daemonSettings(server))
            defer { for daemon in daemons { daemon.stop() } }
            let session = try database.session()
            let campaign = try enqueue(
                Workload.topics[0], "everyone => true, confirm => true, max_per_second => \(rate)", on: session)
            let accepted = "SELECT accepted FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)"
            try eventually("13 seconds' worth is sent", within: 60) {
                try session.number(accepted) >= Double(13 * rate)
            }
            try session.run("SELECT tokenkeeper.cancel_campaign(\(campaign))")
        }
        _ = try server.stop()
        let arrivals = try server.arrivals()
        let worth = Double(10 * rate)
        let measure = "requests within any ten seconds at \(rate) per second by three daemons, over the rate"
        report.compare("most \(measure)", Spread([Double(arrivals.most(within: 10_000)) / worth]), atMost: 1.05)
        report.compare(
            "fewest \(measure)", Spread([Double(arrivals.fewest(within: 10_000) ?? 0) / worth]), atLeast: 0.95)
    }

    /// - Returns: The `campaign_id`.
    private func enqueue(_ topic: String, _ audience: String, on session: Session) throws -> Int {
        Int(try session.number("SELECT tokenkeeper.enqueue('\(SendingWork.payload)', '\(topic)', \(audience))"))
    }
}
