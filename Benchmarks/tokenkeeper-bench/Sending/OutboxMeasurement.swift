import Foundation
import LedgerTestSupport

/// The whole daemon: from the outbox through the gate to APNs, and the responses through the queue into the ledger.
struct OutboxMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let (single, campaigns) = ("single requests", "campaigns")
    /// Topics with few requests each.
    private static let (topics, requestsPerTopic) = (3000, 5)
    private static let (together, alone) = ("many topics in a transaction", "a transaction for each topic")

    func run() throws {
        let work = try SendingWork()
        try SendingServer(.validating, work).stop()
        var memory: [Double] = []
        var firsts: [Double] = []
        var wrong: String?
        func check(_ server: SendingServer, _ requests: Int, left: Double) throws {
            let counted = try server.stop()
            if counted?.outcomes == ["200": requests] && left == 0 { return }
            wrong = "DISQUALIFIED: the fake saw \(counted?.outcomes ?? [:]), \(Int(left)) requests are left"
            Progress.say(wrong ?? "")
        }
        let contest = try Contest(
            "\(Scale.short(scale.outboxSends)) single requests, and \(Scale.short(workload.tokens)) requests of campaigns",
            rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.single) { _ in
                    let server = try SendingServer(.validating, work)
                    let (sample, bytes, left) = try send(scale.outboxSends, work, server, queue: queueSingle)
                    memory.append(bytes)
                    try check(server, scale.outboxSends, left: left)
                    return sample
                },
                Contest.Contestant(name: Self.campaigns) { _ in
                    let server = try SendingServer(.validating, work)
                    let (sample, first, left) = try sendCampaigns(work, server)
                    firsts.append(first)
                    try check(server, workload.tokens, left: left)
                    return sample
                },
            ])
        report.add(contest)
        for name in [Self.single, Self.campaigns] {
            report.compare(
                "\(name) a second, until the last response is in the ledger", contest.rate(name),
                atLeast: name == Self.campaigns ? 20_000 : nil, digits: 0, verdict: wrong)
            report.compare(
                "processor time of the client in the daemon a request: \(name)", contest.cpu(name, \.clientSeconds),
                digits: 1, unit: " µs")
            report.compare(
                "processor time of the daemon with its client a request: \(name)",
                contest.cpu(name, \.daemonSeconds), digits: 1, unit: " µs")
            report.compare(
                "processor time of PostgreSQL a request: \(name)", contest.cpu(name, \.serverSeconds), digits: 1,
                unit: " µs")
        }
        report.compare(
            "campaigns over single requests", contest.ratio(Self.campaigns, over: Self.single), atLeast: 1.8)
        report.compare(
            "from the call of enqueue until the first response is written, \(Scale.short(workload.tokens)) tokens",
            Spread(firsts), atMost: 200, digits: 0, unit: " ms")
        report.compare("memory (RSS) of the daemon afterwards", Spread(memory), digits: 1, unit: " MB")
        try sendManyTopics(work)
        try weigh()
    }

    /// Few requests of each of many topics, as today, and as before claims had many topics.
    private func sendManyTopics(_ work: SendingWork) throws {
        let requests = Self.topics * Self.requestsPerTopic
        var wrong: String?
        let contest = try Contest(
            "\(Self.topics) topics with \(Self.requestsPerTopic) requests each", rounds: scale.rounds,
            [Self.together, Self.alone].map { name in
                Contest.Contestant(name: name) { _ in
                    let server = try SendingServer(.validating, work)
                    let (sample, _, left) = try send(requests, work, server) { session in
                        if name == Self.alone { try Self.claimAlone(session) }
                        try session.run(
                            """
                            INSERT INTO tokenkeeper.send_request (topic, token, payload)
                            SELECT 'com.example.t' || i % \(Self.topics), \(workload.token("i")), '\(SendingWork.payload)'
                            FROM generate_series(0::bigint, \(requests - 1)) AS i
                            """)
                    }
                    let counted = try server.stop()
                    if counted?.outcomes != ["200": requests] || left != 0 {
                        wrong = "DISQUALIFIED: the fake saw \(counted?.outcomes ?? [:]), \(Int(left)) requests are left"
                    }
                    return sample
                }
            })
        report.add(contest)
        for name in [Self.together, Self.alone] {
            report.compare(
                "single requests a second of \(Self.topics) topics with \(Self.requestsPerTopic) each: \(name)",
                contest.rate(name), digits: 0, verdict: wrong)
        }
        report.compare("the first of these over the second", contest.ratio(Self.together, over: Self.alone))
    }

    /// Makes the daemon claim each topic in a transaction of its own: it does so when a claim of many fails.
    private static func claimAlone(_ session: Session) throws {
        try session.run(
            """
            DO $do$ BEGIN
                EXECUTE regexp_replace(pg_get_functiondef('tokenkeeper.claim_topics'::regproc), 'BEGIN',
                                       'BEGIN RAISE EXCEPTION ''each topic alone'' USING ERRCODE = ''data_exception'';');
            END $do$
            """)
    }

    /// What requests take in PostgreSQL while they wait.
    private func weigh() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        try queueSingle(on: session)
        let single = try session.number("SELECT pg_total_relation_size('tokenkeeper.send_request')")
        report.note(
            "bytes of a queued single request", "\(Int(single) / scale.outboxSends)")
        let campaign = try enqueue(Workload.topics[0], on: session)
        let most = min(workload.tokens / 4, 100_000)
        while try session.number("SELECT addressed FROM tokenkeeper.campaign") < Double(most) {
            try session.run("SELECT tokenkeeper.address_campaign(\(Int(campaign)), \(most))")
        }
        let batches = try session.number("SELECT pg_total_relation_size('tokenkeeper.campaign_batch')")
        let addressed = try session.number("SELECT addressed FROM tokenkeeper.campaign")
        report.compare("bytes of a queued request of a campaign", Spread([batches / addressed]), atMost: 100, digits: 0)
    }

    private func queueSingle(on session: Session) throws {
        try session.run(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT \(workload.topic("i")), \(workload.token("i")), '\(SendingWork.payload)'
            FROM generate_series(0::bigint, \(scale.outboxSends - 1)) AS i
            """)
    }

    /// - Returns: The `campaign_id`.
    private func enqueue(_ topic: String, on session: Session) throws -> Double {
        try session.number(
            "SELECT tokenkeeper.enqueue('\(SendingWork.payload)', '\(topic)', everyone => true, confirm => true)")
    }

    /// A campaign to everyone in each topic.
    ///
    /// - Returns: Also the milliseconds until the first response was written, and how many requests ended without a response.
    private func sendCampaigns(_ work: SendingWork, _ server: SendingServer) throws -> (Sample, Double, Double) {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(on: database, settings: work.daemonSettings(server))
        defer { for daemon in daemons { daemon.stop() } }
        try session.run("CHECKPOINT")
        let before = try Drain.counted(session)
        let stopwatch = try Stopwatch(cluster, daemons)
        let start = ContinuousClock.now
        _ = try enqueue(Workload.topics[0], on: session)
        while try session.number("SELECT count(*) FROM tokenkeeper.campaign_ending") == 0 { usleep(2000) }
        let first = start.duration(to: .now) / .milliseconds(1)
        for topic in Workload.topics.dropFirst() { _ = try enqueue(topic, on: session) }
        let followed = try Drain.follow(session, from: before, rows: workload.tokens) {
            daemons.allSatisfy { kill($0.pid, 0) == 0 }
        }
        var sample = try stopwatch.sample(rows: workload.tokens, end: followed.end)
        sample.quarters = followed.quarters
        let left = try session.number(
            "SELECT sum(addressed - accepted) + (SELECT count(*) FROM tokenkeeper.send_request) FROM tokenkeeper.campaign_progress"
        )
        return (sample, first, left)
    }

    /// - Returns: Also the resident memory in MB at the end, and how many requests ended without a response.
    private func send(
        _ requests: Int, _ work: SendingWork, _ server: SendingServer, queue: (Session) throws -> Void
    ) throws -> (Sample, Double, Double) {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(on: database, settings: work.daemonSettings(server))
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.pause(daemons, on: session)
        try queue(session)
        try session.run("ANALYZE tokenkeeper.send_request")
        try session.run("CHECKPOINT")
        let before = try Drain.counted(session)
        let stopwatch = try Stopwatch(cluster, daemons)
        MeasuredDaemon.resume(daemons)
        let followed = try Drain.follow(session, from: before, rows: requests) {
            daemons.allSatisfy { kill($0.pid, 0) == 0 }
        }
        var sample = try stopwatch.sample(rows: requests, end: followed.end)
        sample.quarters = followed.quarters
        let memory = Double(ProcessorTime.kilobytes("VmRSS", of: daemons[0].pid)) * 1024 / 1_000_000
        let left = try session.number(
            """
            SELECT (SELECT count(*) FROM tokenkeeper.send_request) + (SELECT count(*) FROM tokenkeeper.suppressed_send)
                 + (SELECT count(*) FROM tokenkeeper.failed_send)
            """)
        return (sample, memory, left)
    }
}
