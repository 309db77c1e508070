import Dispatch
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// The limit on background pushes per device when several daemons claim at once.
@Suite(.ownThread) struct `The limit on background pushes, across daemons` {
    let database: TestDatabase
    let app = TopicScope(environment: "production", topic: "com.example.app")

    static let limit = 3
    static let silent = #"{"aps":{"content-available":1}}"#

    init() throws {
        database = try TestCluster.shared.database()
        // A session that waits for a lock looks for a deadlock at once.
        try database.psql("ALTER DATABASE \(database.name) SET deadlock_timeout = '1ms'", user: "postgres")
    }

    private func outbox(_ number: Int) -> Outbox {
        Outbox(daemonID: "host/\(number)/1", processScope: "here", lockTimeout: .seconds(60))
    }

    /// Queues background pushes: this many for each of the tokens with these numbers.
    private func ask(_ requests: Int, tokens: ClosedRange<Int>, payload: String = silent) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.app', lpad(to_hex(t), 8, '0'), '\(payload)'
            FROM generate_series(1, \(requests)), generate_series(\(tokens.lowerBound), \(tokens.upperBound)) AS t ORDER BY random()
            """)
    }

    private func claimed() throws -> String {
        try database.psql(
            "SELECT string_agg(token || ' ' || n, ', ' ORDER BY token) FROM (SELECT token, count(*) AS n FROM tokenkeeper.send_request WHERE claimed_by IS NOT NULL GROUP BY 1) AS c"
        )
    }

    /// Claims in the transaction of another daemon, which stays open, and then as a second daemon, which has to wait.
    private func claimAtOnce(first most: Int) throws -> Outbox.Claim {
        var first = try database.connect(user: "a_daemon")
        try first.execute(
            "BEGIN; SELECT count(*) FROM tokenkeeper.claim_requests('production', 'com.example.app', 'host/1/1', \(most), \(Self.limit), '-infinity')"
        )
        let result = Mutex<Result<Outbox.Claim, any Error>?>(nil)
        let (database, outbox, app) = (database, outbox(2), app)
        let group = DispatchGroup()
        DispatchQueue.global().async(group: group) {
            let outcome = Result {
                var second = try database.connect(user: "a_daemon")
                return try outbox.claim(app, most: 100, backgroundPerHour: Self.limit, on: &second)
            }
            result.withLock { $0 = outcome }
        }
        try eventually("the second waits, or has claimed") {
            try result.withLock { $0 != nil }
                || database.psql(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                    user: "postgres") == "1"
        }
        try first.execute("COMMIT")
        group.wait()
        return try result.withLock { try $0!.get() }
    }

    @Test(arguments: [0, 1])
    func `two claims at the same moment share a device's limit`(sentBefore: Int) throws {
        if sentBefore > 0 {
            try ask(sentBefore, tokens: 1...1)
            var daemon = try database.connect(user: "a_daemon")
            let before = try outbox(3).claim(app, most: 100, backgroundPerHour: Self.limit, on: &daemon)
            #expect(before.requests.count == sentBefore)
        }
        try ask(4, tokens: 1...1)
        let second = try claimAtOnce(first: 2)
        #expect(second.requests.count == Self.limit - sentBefore - 2)
        #expect(try claimed() == "00000001 3")
        #expect(
            try database.psql("SELECT cardinality(sent_at), room FROM tokenkeeper.background_send")
                == "3|\(Self.limit - sentBefore - 2)")
        #expect(
            try database.psql(
                "SELECT count(*), bool_and(scheduled_at > now() + interval '59 minutes') FROM tokenkeeper.send_request WHERE postponed"
            ) == "1|t", "the newest waits")
    }

    @Test func `claims of alerts, and of other devices, do not wait`() throws {
        try ask(2, tokens: 1...1)
        var first = try database.connect(user: "a_daemon")
        try first.execute(
            "BEGIN; SELECT count(*) FROM tokenkeeper.claim_requests('production', 'com.example.app', 'host/1/1', 100, 3, '-infinity')"
        )
        try ask(2, tokens: 1...2, payload: #"{"aps":{"alert":"Hello"}}"#)
        try ask(2, tokens: 2...2)
        var daemon = try database.connect(user: "a_daemon")
        let impatient = Outbox(daemonID: "host/2/1", processScope: "here", lockTimeout: .milliseconds(1))
        #expect(try impatient.claim(app, most: 100, backgroundPerHour: 3, on: &daemon).requests.count == 6)
        try first.execute("COMMIT")
    }

    @Test func `any number of daemons keep the limit, and never deadlock`() throws {
        let seed = Seed.next()
        let (database, app) = (database, app)
        try ask(6, tokens: 1...40)
        try ask(2, tokens: 1...40, payload: #"{"aps":{"alert":"Hello"}}"#)
        let failures = Failures()
        let reached = Mutex<[TokenAddress: Int]>([:])
        atOnce(6) { worker in
            var chance = SeededChance(seed: seed &+ UInt64(worker))
            let outbox = self.outbox(worker)
            do {
                var daemon = try database.connect(user: "a_daemon")
                for _ in 1...60 {
                    let claim = try outbox.claim(
                        app, most: .random(in: 1...40, using: &chance), backgroundPerHour: Self.limit, on: &daemon)
                    var endings: [RequestEnding] = []
                    for request in claim.requests.shuffled(using: &chance) {
                        // Half of the requests do not reach their device.
                        let fate = [
                            RequestFate.answered, .interrupted(.zero, "gone"), .later(.zero, "503"),
                            .refused(.zero, "403"), .returned(nil),
                        ]
                        .randomElement(using: &chance)!
                        endings.append(RequestEnding(number: request.number, fate: fate))
                        switch fate {
                        case .answered, .interrupted:
                            guard request.request.pushType == .background else { continue }
                            reached.withLock { $0[request.request.address, default: 0] += 1 }
                        case .failed, .later, .refused, .returned: continue
                        }
                    }
                    try outbox.finish(endings, on: &daemon)
                }
            } catch {
                failures.add("\(worker): \(error)")
            }
        }
        #expect(failures.all == [])
        let counts = reached.withLock { $0.values.sorted() }
        #expect(counts.last ?? 0 <= Self.limit, "\(counts)")
        #expect(counts.reduce(0, +) > 40)
    }
}
