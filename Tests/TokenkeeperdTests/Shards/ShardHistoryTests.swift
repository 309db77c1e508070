import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// A registration, a logout, a change of tags or a result, as a statement for a router and for the model.
private struct Step {
    var sql: String
    var user = "a_app"
    var apply: (inout LedgerModel) -> Void

    /// Whether it is a row of the queue of results.
    var isResult: Bool { user == "a_sender" }
}

@Suite(.ownThread) struct `Histories through routers` {
    private static let tokens = (0..<40).map { String(format: "%04x", 0xA000 + $0 * 7) }

    /// A session at a router, in a dictionary.
    private final class Session {
        var connection: Connection

        init(_ connection: consuming Connection) {
            self.connection = connection
        }
    }

    /// Four shards in three clusters, a daemon for each, and two routers that are used in turn. Daemons are killed, and the last shard's
    /// PostgreSQL crashes and is away for a while. What fails is repeated through the other router, as an application would.
    @Test func `leave what the model says, though daemons are killed and a shard crashes`() throws {
        let seed =
            ProcessInfo.processInfo.environment["MODEL_SEED"].flatMap(UInt64.init)
            ?? UInt64.random(in: 0...UInt64(UInt32.max))
        print("shard history seed \(seed)")
        var chance = SeededChance(seed: seed)
        let crashing = try TestCluster.prepared()
        let stage = try TestShards(last: crashing)
        let folder = try TemporaryDirectory()
        let map = try folder.write(TestShards.mapText(stage.shards), to: "shards.toml")
        func daemon(_ number: Int) throws -> DaemonProcess {
            try DaemonProcess(
                stage.shards[number].url(),
                settings: [
                    "shards.map=\(map)", "sweep.interval=off", "drain.poll_idle=50ms", "guard.hold_stale_share=100%",
                ])
        }
        var daemons = try stage.shards.indices.map(daemon)
        let sessions = try stage.routers.map { router in
            try ["a_app", "a_sender"].reduce(into: [String: Session]()) {
                $0[$1] = Session(try router.connect(user: $1))
            }
        }
        var model = LedgerModel()
        var (turn, refused) = (0, 0)
        // Of the results: how many INSERTs were committed, and how many failed. One that failed at its commit may be queued all the same.
        var (results, failures) = (0, 0)
        var late: [Step] = []
        func execute(_ step: Step) throws {
            try eventually("a router takes \(step.sql)") {
                turn += 1
                do {
                    try sessions[turn % 2][step.user]!.connection.execute(step.sql)
                    return true
                } catch is DatabaseError {
                    if step.isResult { failures += 1 }
                    return false
                }
            }
            if step.isResult { results += 1 }
            step.apply(&model)
        }
        let onLast = try Self.tokens.filter { try stage.shard(of: $0).name == stage.shards[3].name }
        for history in 0..<Soak.size(3, whole: 12) {
            let topic = "com.example.\(history)"
            for number in 0..<150 {
                if number == 50 {
                    // Those that others need go on, and nobody is told a wrong answer.
                    crashing.stop()
                    try Self.checkThatOthersWork(stage, without: onLast, topic)
                    daemons[3].signal(SIGKILL)
                    daemons[3].wait()
                }
                let step = Self.step(topic, &chance)
                if number == 80 {
                    try crashing.start()
                    daemons[3] = try daemon(3)
                    for step in late { try execute(step) }
                    refused += late.count
                    late = []
                }
                if (50..<80).contains(number), onLast.contains(where: step.sql.contains) {
                    // It fails, and leaves nothing.
                    #expect(throws: DatabaseError.self) {
                        try sessions[number % 2][step.user]!.connection.execute(step.sql)
                    }
                    late.append(step)
                } else {
                    try execute(step)
                }
                if Int.random(in: 0..<40, using: &chance) == 0 {
                    let victim = Int.random(in: 0..<3, using: &chance)
                    daemons[victim].signal(SIGKILL)
                    daemons[victim].wait()
                    daemons[victim] = try daemon(victim)
                }
            }
        }
        try TestShards.settle(stage.shards)
        var told: Set<String> = []
        for shard in stage.shards {
            var reader = try shard.connect()
            told.formUnion(try reader.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        }
        let wanted = model.told()
        #expect(
            told == wanted,
            "seed \(seed): told \(told.subtracting(wanted).sorted().prefix(5)), the model says \(wanted.subtracting(told).sorted().prefix(5))"
        )
        #expect(refused > 0)
        for daemon in daemons { #expect(daemon.stop() == 0) }
        // A 410 that is lost shows in the state of its token, any result in the counts, and one that is rejected in its table.
        let counted = try stage.shards.reduce(0) {
            $0 + (Int(try $1.psql("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat")) ?? -1_000_000)
        }
        #expect(
            (results...results + failures).contains(counted),
            "seed \(seed): \(counted) results of \(results), and \(failures) INSERTs failed")
        for shard in stage.shards {
            #expect(
                try shard.psql(
                    "SELECT (SELECT count(*) FROM tokenkeeper.rejected_result) + (SELECT count(*) FROM tokenkeeper.rejected_registration)"
                ) == "0")
        }
    }

    private static func checkThatOthersWork(_ stage: TestShards, without onLast: [String], _ topic: String) throws {
        let router = stage.routers[0]
        let failure = try #require(throws: TestFailure.self) {
            try router.psql("SELECT tokenkeeper.is_sendable('\(onLast[0])', '\(topic)')", user: "a_sender")
        }
        #expect(failure.description.contains("[\(stage.shards[3].name)]"), "\(failure)")
        let others = tokens.filter { !onLast.contains($0) }
        for token in others.prefix(5) {
            let answer = try router.psql("SELECT tokenkeeper.is_sendable('\(token)', '\(topic)')", user: "a_sender")
            #expect(["t", "f"].contains(answer))
        }
        #expect(
            try router.psql("SELECT critical_warnings FROM tokenkeeper.status", user: "a_reader")
                .contains("shard 3 does not answer"))
    }

    private static func step(_ topic: String, _ chance: inout SeededChance) -> Step {
        let at = 1_700_000_000 + Int.random(in: 0..<400, using: &chance)
        let token = tokens.randomElement(using: &chance)!
        let key = LedgerModel.Key("production", topic, token)
        func name(_ prefix: String) -> String? {
            switch Int.random(in: 0..<8, using: &chance) {
            case 0, 1: nil
            case 2: ""
            default: "\(prefix)\(Int.random(in: 0..<8, using: &chance))"
            }
        }
        func literal(_ text: String?) -> String { text.map { "'\($0)'" } ?? "NULL" }
        let tags: String? =
            switch Int.random(in: 0..<5, using: &chance) {
            case 0: "g\(Int.random(in: 0..<5, using: &chance)),g\(Int.random(in: 5..<8, using: &chance))"
            default: nil
            }
        let array = tags.map { "'{\($0)}'" } ?? "NULL"
        switch Int.random(in: 0..<14, using: &chance) {
        case 12, 13:
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, sent_at)
                    VALUES ('production', '\(topic)', '\(token)', '200', now())
                    """, user: "a_sender"
            ) { _ in }
        case 10, 11:
            let tag = "g\(Int.random(in: 0..<8, using: &chance))"
            let isAdded = Bool.random(using: &chance)
            return Step(
                sql: """
                    SELECT tokenkeeper.tag('\(topic)', token => '\(token)', \(isAdded ? "add" : "remove") => '{\(tag)}', changed_at => to_timestamp(\(at)))
                    """
            ) { $0.tag(key, at, tag, isAdded: isAdded) }
        case 0:
            return Step(
                sql: "SELECT tokenkeeper.unregister('\(token)', '\(topic)', 'production', to_timestamp(\(at)))"
            ) { $0.unregister(key, at) }
        case 1, 2:
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at)
                    VALUES ('production', '\(topic)', '\(token)', '410', '{"reason":"Unregistered","timestamp":\(at)000}', now())
                    """, user: "a_sender"
            ) { $0.dies(key, at, "Unregistered", receivedAt: at) }
        case 3, 4:
            let (device, user) = (name("d"), name("u"))
            return Step(
                sql: """
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags)
                    VALUES ('production', '\(topic)', '\(token)', to_timestamp(\(at)), \(literal(device)), \(literal(user)), \(array))
                    """
            ) { $0.register(key, at, device: device, tags: tags, user: user) }
        default:
            let (device, user) = (name("d"), name("u"))
            return Step(
                sql: """
                    SELECT tokenkeeper.register('\(token)', '\(topic)', 'production', to_timestamp(\(at)), \(literal(device)), \(array),
                                                user_id => \(literal(user)))
                    """
            ) { $0.register(key, at, device: device, tags: tags, user: user) }
        }
    }
}
