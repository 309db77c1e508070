import Foundation
import LedgerTestSupport

/// Queued registrations, which the daemon applies, compared with bare SQL that makes the same ledger out of a plain table; and how soon the gate
/// knows of a registration.
struct RegistrationMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let bare = "bare SQL, registrations"
    private static let daemon = "tokenkeeperd, registrations"
    private static let one = "tokenkeeperd, registrations, one connection"

    func run() throws {
        let registrations = try RegistrationWorkload(rows: scale.registrations, on: cluster, from: template)
        let contest = try contest(
            registrations, rounds: scale.rounds,
            [Self.daemon: MeasuredDaemon.brisk, Self.one: MeasuredDaemon.briskAlone])
        try CopyToGate(
            registrations: registrations, scale: scale, report: report,
            perSecond: contest.rate(Self.daemon).median / 2
        ).run()
        try registrations.drop()
        let many = try RegistrationWorkload(rows: scale.manyRegistrations, on: cluster, from: template)
        _ = try self.contest(many, rounds: 1, [Self.daemon: MeasuredDaemon.brisk])
        try many.drop()
    }

    /// - Parameter daemons: The settings of the daemon, by the contestant's name.
    private func contest(
        _ registrations: RegistrationWorkload, rounds: Int, _ daemons: [String: [String]]
    ) throws -> Contest {
        let referee = Referee(reference: Self.bare)
        let size = Scale.short(registrations.rows)
        let contestants =
            [contestant(Self.bare, registrations, referee) { try bareSQL(registrations, on: $0) }]
            + daemons.sorted { $0.key < $1.key }.map { name, settings in
                contestant(name, registrations, referee) { database in
                    try drain(registrations, on: database, settings: settings)
                }
            }
        let contest = try Contest("\(size) registrations", rounds: rounds, contestants)
        report.add(contest)
        let measures = [
            (Self.daemon, "\(size) registrations by COPY until they are applied, over bare SQL", 0.5 as Double?),
            (Self.one, "the same with drain.second_connection=off", nil),
        ]
        for (name, measure, least) in measures where daemons[name] != nil {
            report.compare(
                measure, contest.ratio(name, over: Self.bare), atLeast: least, verdict: referee.verdict(name))
        }
        return contest
    }

    private func contestant(
        _ name: String, _ registrations: RegistrationWorkload, _ referee: Referee,
        _ perform: @escaping (Database) throws -> Sample
    ) -> Contest.Contestant {
        Contest.Contestant(name: name) { round in
            let database = try registrations.copy()
            defer { try? database.drop() }
            let sample = try perform(database)
            try referee.note(name, round: "\(round + 1)", database.session())
            return sample
        }
    }

    private func bareSQL(_ registrations: RegistrationWorkload, on database: Database) throws -> Sample {
        let session = try database.session()
        try session.run("\(RegistrationWorkload.create("queued")); CHECKPOINT")
        let stopwatch = try Stopwatch(cluster)
        try session.run(registrations.copyStatement(into: "queued"))
        try session.run("ANALYZE queued")
        try session.run("\(Recording.begin) \(RegistrationFloor.statements(from: "queued")); COMMIT")
        return try stopwatch.sample(rows: registrations.rows)
    }

    private func drain(
        _ registrations: RegistrationWorkload, on database: Database, settings: [String]
    ) throws -> Sample {
        let session = try database.session()
        let daemons = try MeasuredDaemon.start(on: database, settings: settings)
        defer { for daemon in daemons { daemon.stop() } }
        try session.run("CHECKPOINT")
        let stopwatch = try Stopwatch(cluster, daemons)
        try session.run(registrations.copyStatement(into: "tokenkeeper.registration"))
        var queue = RegistrationQueueReader(session)
        let end = try queue.waitUntilEmpty { daemons.allSatisfy { kill($0.pid, 0) == 0 } }
        let sample = try stopwatch.sample(rows: registrations.rows, end: end)
        let other = try session.number(
            """
            SELECT (SELECT count(*) FROM tokenkeeper.registration) + (SELECT count(*) FROM tokenkeeper.rejected_registration)
                   + (SELECT count(*) FROM tokenkeeper.held_registration)
            """)
        guard other == 0 else { throw TestFailure("\(Int(other)) registrations were not applied") }
        return sample
    }
}
