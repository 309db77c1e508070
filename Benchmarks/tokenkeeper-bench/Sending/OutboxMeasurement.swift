import Foundation
import LedgerTestSupport

/// The whole daemon: from the outbox through the gate to APNs, and the responses through the queue into the ledger.
struct OutboxMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let name = "tokenkeeperd run"

    func run() throws {
        let work = try SendingWork()
        try SendingServer(.validating, work).stop()
        var memory: [Double] = []
        var wrong: String?
        let contest = try Contest(
            "\(Scale.short(scale.outboxSends)) requests from the outbox", rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.name) { round in
                    let server = try SendingServer(.validating, work)
                    let (sample, bytes, left) = try send(round, work, server)
                    memory.append(bytes)
                    let counted = try server.stop()
                    if counted?.outcomes != ["200": scale.outboxSends] || left != 0 {
                        wrong = "DISQUALIFIED: the fake saw \(counted?.outcomes ?? [:]), \(Int(left)) requests are left"
                        Progress.say(wrong ?? "")
                    }
                    return sample
                }
            ])
        report.add(contest)
        report.compare(
            "requests a second through the outbox, until the last response is in the ledger", contest.rate(Self.name),
            digits: 0, verdict: wrong)
        report.compare(
            "processor time of the daemon a request through the outbox", contest.cpu(Self.name, \.daemonSeconds),
            digits: 1, unit: " µs")
        report.compare(
            "processor time of PostgreSQL a request through the outbox", contest.cpu(Self.name, \.serverSeconds),
            digits: 1, unit: " µs")
        report.compare("memory (RSS) of the daemon afterwards", Spread(memory), digits: 1, unit: " MB")
    }

    /// - Returns: Also the resident memory in MB at the end, and how many requests ended without a response.
    private func send(_ round: Int, _ work: SendingWork, _ server: SendingServer) throws -> (Sample, Double, Double) {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(
            on: database,
            settings: MeasuredDaemon.brisk + [
                "send.production_server=localhost:\(server.port)", "send.ca_file=\(work.authorityFile)",
                "credential.main.key_file=\(work.keyFile)", "credential.main.key_id=\(SendingWork.keyID)",
                "credential.main.team_id=\(SendingWork.teamID)", "credential.main.topics=com.example.*",
            ])
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.pause(daemons, on: session)
        try session.run(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT \(workload.topic("i")), \(workload.token("i")), '\(SendingWork.payload)'
            FROM generate_series(0::bigint, \(scale.outboxSends - 1)) AS i
            """)
        try session.run("ANALYZE tokenkeeper.send_request")
        try session.run("CHECKPOINT")
        let before = try Drain.counted(session)
        let stopwatch = try Stopwatch(cluster, daemons)
        MeasuredDaemon.resume(daemons)
        let followed = try Drain.follow(session, from: before, rows: scale.outboxSends) {
            daemons.allSatisfy { kill($0.pid, 0) == 0 }
        }
        var sample = try stopwatch.sample(rows: scale.outboxSends, end: followed.end)
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
