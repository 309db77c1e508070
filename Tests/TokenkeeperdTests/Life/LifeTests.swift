import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenLedger

/// Daemons, applications and senders run while faults of every kind overlap in random order. In the end, a journal outside the database says what must be
/// there.
///
/// `make faults SEED=1 MINUTES=60` lasts an hour, with the pauses of production.
@Suite(.ownThread) struct `Life among faults` {
    private static let minutes =
        ProcessInfo.processInfo.environment["FAULT_MINUTES"].flatMap(Double.init) ?? (Soak.isWhole ? 60 : 0.25)
    private static let isLong = minutes >= 10

    @Test func `nothing is lost or counted twice, and no token is suppressed without cause`() throws {
        let seed = Seed.next(function: "nothing is lost or counted twice")
        let stage = try LifeStage(seed: seed, timing: Self.isLong ? 1 : 0.1)
        defer { stage.stop() }
        var faults = FaultRounds(seed: seed)
        do {
            let found = try Self.live(on: stage, seed: seed) {
                while faults.began.duration(to: .now) < .seconds(Self.minutes * 60) {
                    try faults.next(on: stage, healsWithin: Self.isLong ? 300 : 60)
                }
            }
            if !found.isEmpty { throw TestFailure(found.joined(separator: "\n")) }
        } catch {
            print("seed \(seed); faults:\n\(faults.history.suffix(30).joined(separator: "\n"))")
            print(stage.cluster.activity(in: stage.database))
            throw error
        }
        print("\(stage.journal.summary); \(faults.summary)")
    }

    /// A check that cannot fail is worse than none.
    @Test(arguments: PlantedFault.allCases)
    fileprivate func `the journal finds a planted fault`(_ fault: PlantedFault) throws {
        let seed = Seed.next(fault.rawValue, function: "the journal finds a planted fault")
        let stage = try LifeStage(seed: seed, timing: 0.1)
        defer { stage.stop() }
        try stage.run(fault.sql)
        let found: [String]
        do {
            found = try Self.live(on: stage, seed: seed) { sleep(6) }
        } catch let error as DatabaseError where fault == .lostUpdate && error.sqlState == "23502" {
            // The counts do not add up any more, and a constraint says so first.
            return
        }
        if !found.contains(where: { $0.contains(fault.words) }) {
            Issue.record("seed \(seed): \(stage.journal.summary): \(found)")
        }
    }

    @Test func `processes believe that the disk is full, and that it is another hour`() throws {
        let illusion = try Illusion()
        let cluster = try TestCluster(environment: illusion.environment)
        var admin = try cluster.connect(database: "postgres")
        let growing = "CREATE TABLE large AS SELECT repeat(i::text, 1000) FROM generate_series(1, 10000) AS i"
        try illusion.fillDisk(true)
        let error = #expect(throws: DatabaseError.self) { try admin.run(growing) }
        #expect(error?.sqlState == "53100")
        try illusion.fillDisk(false)
        try admin.run(growing)
        try illusion.setClock(off: 7_200)
        let hour = try ProgramRun(["date", "+%s"], environment: illusion.environment).output
        #expect((Double(hour.dropLast()) ?? 0) > Date.now.timeIntervalSince1970 + 7_000)
    }

    /// Lets applications live for as long as this takes, and until all that they did is done.
    ///
    /// - Returns: What contradicts the journal.
    private static func live(on stage: LifeStage, seed: UInt64, _ work: () throws -> Void) throws -> [String] {
        stage.proxy.behave()
        let applications = LifeApplications(stage.journal, seed, url: stage.url)
        try work()
        try applications.end()
        try stage.settle()
        var admin = try stage.connect()
        return try stage.journal.contradictions(on: &admin)
    }
}

/// A bug of ours, made by a trigger.
private enum PlantedFault: String, CaseIterable {
    case lostUpdate, countedTwice, suppressedWithoutCause, lostRequest, pushedAgain

    /// What the journal says.
    var words: String {
        switch self {
        case .lostUpdate: "the journal: "
        case .countedTwice: "results are counted"
        case .suppressedWithoutCause: " is stale"
        case .lostRequest: "was lost"
        case .pushedAgain: "was pushed"
        }
    }

    private var trigger: (table: String, when: String, action: String) {
        switch self {
        case .lostUpdate:
            ("ledger", "BEFORE INSERT OR UPDATE", "IF random() < 0.2 THEN RETURN NULL; END IF; RETURN new;")
        case .countedTwice:
            (
                "result_count", "BEFORE INSERT OR UPDATE",
                "IF random() < 0.1 THEN new.results := new.results + 1; END IF; RETURN new;"
            )
        case .suppressedWithoutCause:
            (
                "result_count", "AFTER INSERT OR UPDATE",
                """
                UPDATE tokenkeeper.ledger SET stale_at = registered_at
                WHERE token_key = decode(lpad('11', 64, '0'), 'hex') AND stale_at IS DISTINCT FROM registered_at;
                RETURN NULL;
                """
            )
        case .lostRequest: ("send_request", "BEFORE INSERT", "IF random() < 0.05 THEN RETURN NULL; END IF; RETURN new;")
        case .pushedAgain:
            (
                "send_request", "AFTER DELETE",
                """
                IF random() < 0.8 THEN
                    INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id) VALUES (old.topic, old.token, old.payload, old.apns_id);
                END IF;
                RETURN NULL;
                """
            )
        }
    }

    var sql: String {
        """
        CREATE FUNCTION public.planted() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN \(trigger.action) END $$;
        CREATE TRIGGER planted \(trigger.when) ON tokenkeeper.\(trigger.table) FOR EACH ROW EXECUTE FUNCTION public.planted()
        """
    }
}

/// Faults in random order: one to three at a time, each for a moment, and then a look at how long it takes until results are recorded again.
private struct FaultRounds {
    let began = ContinuousClock.now
    private var chance: SeededChance
    private(set) var history: [String] = []
    private var counts: [String: Int] = [:]
    /// Of faults that were alone.
    private var healed: [String: [Duration]] = [:]

    init(seed: UInt64) { chance = SeededChance(seed: seed) }

    mutating func next(on stage: LifeStage, healsWithin seconds: Int) throws {
        let kinds = LifeFault.all.shuffled(using: &chance).prefix(Int.random(in: 1...3, using: &chance))
        let faults = (kinds.filter { $0.order != .ofServer } + kinds.filter { $0.order == .ofServer }.prefix(1))
            .sorted { $0.order.rawValue < $1.order.rawValue }
        let names = faults.map(\.name)
        history.append("\(began.duration(to: .now)): \(names.joined(separator: "; "))")
        var ends: [() throws -> Void] = []
        for fault in faults { ends.append(try fault.begin(stage, &chance)) }
        usleep(UInt32.random(in: 50_000...1_200_000, using: &chance))
        for end in ends.reversed() { try end() }
        for host in 0..<3 { try stage.revive(host) }
        let time = try stage.heal(within: seconds)
        for name in names { counts[name, default: 0] += 1 }
        if let name = names.first, names.count == 1 { healed[name, default: []].append(time) }
    }

    /// Rows of a table: the kind, how often, and the median and the 99th percentile of the seconds until it had healed.
    var summary: String {
        let rows = counts.sorted { $0.key < $1.key }.map { name, count in
            let times = (healed[name] ?? []).sorted()
            func text(_ share: Double) -> String {
                times.isEmpty
                    ? ""
                    : String(
                        format: "%.1f", times[min(Int(Double(times.count) * share), times.count - 1)] / .seconds(1))
            }
            return "| \(name) | \(count) | \(text(0.5)) | \(text(0.99)) |"
        }
        return "\(counts.values.reduce(0, +)) faults of \(counts.count) of \(LifeFault.all.count) kinds\n"
            + rows.joined(separator: "\n")
    }
}
