import LedgerTestSupport
import Testing
import TokenLedger

/// Several databases as shards, and the messages between them, which arrive when and as often as a test wants.
struct ShardedLedger {
    struct Package: Sendable {
        var from: Int
        var to: Int
        var messages: String
    }

    struct Receipt: Sendable {
        var from: Int
        var receipt: String
    }

    /// A connection, in an array.
    final class Session {
        var connection: Connection

        init(_ connection: consuming Connection) {
            self.connection = connection
        }
    }

    let shards: [Session]
    private let daemons: [Session]
    private let shardOf: [String: Int]

    /// - Parameter tokens: All that the test uses.
    init(_ databases: [TestDatabase], tokens: [String]) throws {
        shards = try databases.map { Session(try $0.connect()) }
        daemons = try databases.map { Session(try $0.connect(user: "a_daemon")) }
        for number in shards.indices {
            try shards[number].connection.execute(
                "INSERT INTO tokenkeeper.shard VALUES (\(number), \(databases.count))")
        }
        let numbers = try shards[0].connection.lines(
            """
            SELECT tokenkeeper.shard_of(t, \(databases.count))
            FROM unnest('{\(tokens.joined(separator: ","))}'::text[]) WITH ORDINALITY AS u (t, n) ORDER BY n
            """, columns: 1)
        shardOf = Dictionary(uniqueKeysWithValues: zip(tokens, numbers.compactMap { Int($0) }))
    }

    func shard(of token: String) -> Int { shardOf[token] ?? 0 }

    func execute(_ shard: Int, _ sql: String) throws {
        try shards[shard].connection.execute(sql)
    }

    func apply(_ shard: Int, _ rows: [QueuedRegistration]) throws {
        try daemons[shard].connection.apply(rows)
    }

    /// What a daemon would deliver next; nil if that is nothing.
    func package(from: Int, to: Int, after: String = "", max: Int = 500) throws -> Package? {
        let messages = try daemons[from].connection.scalar(
            "SELECT tokenkeeper.device_messages(\(to), decode('\(after)', 'hex'), \(max))")
        guard let messages, !messages.isEmpty else { return nil }
        return Package(from: from, to: to, messages: messages)
    }

    func deliver(_ package: Package) throws -> Receipt {
        let receipt = try daemons[package.to].connection.scalar(
            "SELECT tokenkeeper.receive_device_messages(\(SQLLiteral.quoted(package.messages)))")
        return Receipt(from: package.from, receipt: receipt ?? "")
    }

    func acknowledge(_ receipt: Receipt) throws {
        try daemons[receipt.from].connection.run(
            "SELECT tokenkeeper.acknowledge_device_messages(\(SQLLiteral.quoted(receipt.receipt)))")
    }

    func check(_ shard: Int) throws {
        try daemons[shard].connection.run("SELECT tokenkeeper.check_next_devices()")
    }

    func sweep(_ shard: Int) throws {
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400),
            allowance: 0, maxShare: .percent(100), batch: 100)
        let lease = try SweepLease.claim(.new(.cli, dryRun: false), holder: "test", on: &daemons[shard].connection)
        let report = try lease.map {
            try Sweep($0, plan, lockTimeout: .milliseconds(50)).perform(on: &daemons[shard].connection) { true }
        }
        guard report?.outcome == .finished else {
            throw TestFailure("the sweep of shard \(shard) ended: \(report as Any)")
        }
    }

    /// Delivers until nothing is left to deliver.
    ///
    /// - Returns: How many packages that took; nil if it does not end.
    func settle() throws -> Int? {
        var delivered = 0
        for _ in 0..<100 {
            var isQuiet = true
            for from in shards.indices {
                try check(from)
                for to in shards.indices {
                    guard let package = try package(from: from, to: to) else { continue }
                    isQuiet = false
                    delivered += 1
                    try acknowledge(deliver(package))
                }
            }
            if isQuiet { return delivered }
        }
        return nil
    }

    /// The ledger of all shards: lines as of ``LedgerModel``.
    func told() throws -> Set<String> {
        var all: Set<String> = []
        for number in shards.indices {
            all.formUnion(try shards[number].connection.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        }
        return all
    }

    /// Delivers all messages, and expects what the model says.
    ///
    /// - Returns: The ledger of the model.
    func expectToSettle(as model: LedgerModel, seed: UInt64) throws -> Set<String> {
        #expect(try settle() != nil, "seed \(seed): the messages end")
        let told = try told()
        let wanted = model.told()
        #expect(
            told == wanted,
            "seed \(seed): told \(told.subtracting(wanted).sorted().prefix(3)), the model says \(wanted.subtracting(told).sorted().prefix(3))"
        )
        return wanted
    }

    /// Each row of a query, on each shard.
    func lines(_ sql: String, columns: Int) throws -> [String] {
        var all: [String] = []
        for number in shards.indices { all += try shards[number].connection.lines(sql, columns: columns) }
        return all
    }
}
