import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `One device, one token, on several shards` {
    private static func token(_ number: Int) -> String { String(0x100 + number, radix: 16) + "0" }

    /// Messages that are late, lost, repeated and out of order: what shards have sent to each other so far.
    private struct Post {
        var packages: [ShardedLedger.Package] = []
        var receipts: [ShardedLedger.Receipt] = []

        /// Does one random thing with the messages between shards.
        mutating func step(_ ledger: ShardedLedger, _ chance: inout SeededChance) throws {
            let shards = 0..<ledger.shards.count
            switch Int.random(in: 0..<10, using: &chance) {
            case 0..<4:
                let after = Bool.random(using: &chance) ? "" : "\(Int.random(in: 10...99, using: &chance))"
                if let package = try ledger.package(
                    from: Int.random(in: shards, using: &chance), to: Int.random(in: shards, using: &chance),
                    after: after, max: Int.random(in: 1...5, using: &chance))
                {
                    packages.append(package)
                }
            case 4..<7:
                guard let package = packages.randomElement(using: &chance) else { return }
                receipts.append(try ledger.deliver(package))
            case 7..<9:
                guard let receipt = receipts.randomElement(using: &chance) else { return }
                try ledger.acknowledge(receipt)
            default:
                try ledger.check(Int.random(in: shards, using: &chance))
            }
        }

        /// A hundred packages and receipts once more, in another order.
        mutating func repeatSome(_ ledger: ShardedLedger, _ chance: inout SeededChance) throws {
            for package in packages.shuffled(using: &chance).prefix(100) {
                receipts.append(try ledger.deliver(package))
            }
            for receipt in receipts.shuffled(using: &chance).prefix(100) { try ledger.acknowledge(receipt) }
        }
    }

    @Test(arguments: [(2, 40, 12, 400), (4, 12, 4, 400), (4, 5, 3, 400), (4, 12, 3, 2)])
    func `registrations and messages in any order leave what the model says`(
        shards: Int, tokens: Int, devices: Int, instants: Int
    ) throws {
        let seed =
            ProcessInfo.processInfo.environment["MODEL_SEED"].flatMap(UInt64.init)
            ?? UInt64.random(in: 0...UInt64(UInt32.max))
        var chance = SeededChance(seed: seed)
        let ledger = try ShardedLedger(
            (0..<shards).map { _ in try TestCluster.shared.database() }, tokens: (0..<tokens).map(Self.token))
        var model = LedgerModel()
        var post = Post()
        for history in 0..<Soak.size(2, whole: 6) {
            for _ in 0..<60 {
                let row = QueuedRegistration.random(
                    "t\(history)", tokens: tokens, devices: devices, instants: instants, &chance)
                row.apply(to: &model)
                let shard = ledger.shard(of: row.token)
                if Bool.random(using: &chance) {
                    try ledger.execute(shard, row.call)
                } else {
                    var batch = [row]
                    for _ in 0..<Int.random(in: 0..<6, using: &chance) {
                        let more = QueuedRegistration.random(
                            "t\(history)", tokens: tokens, devices: devices, instants: instants, &chance)
                        if ledger.shard(of: more.token) == shard {
                            more.apply(to: &model)
                            batch.append(more)
                        }
                    }
                    try ledger.apply(shard, batch)
                }
                if Int.random(in: 0..<3, using: &chance) == 0 {
                    let change = QueuedRegistration.TagCall.random(
                        "t\(history)", tokens: tokens, devices: devices, instants: instants, &chance)
                    change.apply(to: &model)
                    for shard in change.token.map({ [ledger.shard(of: $0)] }) ?? Array(ledger.shards.indices) {
                        try ledger.execute(shard, change.call)
                    }
                }
                for _ in 0..<Int.random(in: 0..<8, using: &chance) { try post.step(ledger, &chance) }
            }
        }
        try post.repeatSome(ledger, &chance)
        let wanted = try ledger.expectToSettle(as: model, seed: seed)
        // What comes once more when all is settled says nothing new.
        try post.repeatSome(ledger, &chance)
        #expect(try ledger.settle() == 0, "seed \(seed)")
        #expect(try ledger.told() == wanted, "seed \(seed)")
    }

    /// Rows as `LedgerModel.ledger` gives them, whose last column has the tags.
    private static func withoutTags(_ rows: Set<String>) -> Set<String> {
        Set(rows.map { $0.split(separator: "|", omittingEmptySubsequences: false).dropLast().joined(separator: "|") })
    }

    /// What a deletion leaves depends on the order of calls, so all messages arrive after each of them. Then each step leaves the same as in one database,
    /// except the tags that deleted tokens leave to their device: docs/decisions/shards.md has the differences.
    @Test func `after forgotten and pruned tokens, the shards have what one database has`() throws {
        let seed =
            ProcessInfo.processInfo.environment["MODEL_SEED"].flatMap(UInt64.init)
            ?? UInt64.random(in: 0...UInt64(UInt32.max))
        var chance = SeededChance(seed: seed)
        let tokens = (0..<8).map(Self.token)
        let ledger = try ShardedLedger((0..<4).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        var one = try TestCluster.shared.database().connect()
        var deletions = 0
        for step in 0..<Soak.size(60, whole: 300) {
            var calls: [(token: String?, sql: String)] = []
            let token = tokens.randomElement(using: &chance) ?? ""
            switch Int.random(in: 0..<20, using: &chance) {
            case 0, 1:
                calls.append((token, "SELECT tokenkeeper.forget('\(token)')"))
                deletions += 1
            case 2, 3:
                // As the sweep does.
                calls.append(
                    (
                        token,
                        """
                        WITH gone AS (DELETE FROM tokenkeeper.ledger WHERE token_key = '\\x\(token)' RETURNING *)
                        DELETE FROM tokenkeeper.device AS d USING gone AS g
                        WHERE g.topic_id = d.topic_id AND g.device_id = d.device_id AND NOT EXISTS (
                            SELECT FROM tokenkeeper.ledger AS o WHERE o.topic_id = d.topic_id AND o.device_id = d.device_id
                              AND o.token_key <> g.token_key)
                          AND NOT tokenkeeper.is_announced(d.topic_id, d.device_id)
                        """
                    ))
                deletions += 1
            case 4:
                let device = "d\(Int.random(in: 0..<3, using: &chance))"
                calls.append((nil, "SELECT tokenkeeper.forget_device('\(device)')"))
                deletions += 1
            case 5, 6:
                var change = QueuedRegistration.TagCall.random("t", tokens: 8, devices: 3, instants: 400, &chance)
                change.at = 1_700_000_000 + step
                calls.append((change.token, change.call))
            default:
                var row = QueuedRegistration.random("t", tokens: 8, devices: 3, instants: 400, &chance)
                // Each is later than the last: what a shard, or one database, remembers of deleted tokens differs, and concerns only late registrations.
                row.at = 1_700_000_000 + step
                calls.append((row.token, row.call))
            }
            for call in calls {
                try one.execute(call.sql)
                for shard in call.token.map({ [ledger.shard(of: $0)] }) ?? Array(ledger.shards.indices) {
                    try ledger.execute(shard, call.sql)
                }
            }
            try #require(try ledger.settle() != nil, "seed \(seed): the messages end")
            let told = Self.withoutTags(try ledger.told())
            let wanted = Self.withoutTags(Set(try one.lines(LedgerModel.ledger, columns: LedgerModel.columns)))
            try #require(
                told == wanted,
                "seed \(seed), step \(step), \(calls): told \(told.subtracting(wanted).sorted()), one database has \(wanted.subtracting(told).sorted())"
            )
        }
        #expect(deletions > 3)
    }

    /// Where a shard has a token or a device in what it exchanges with others.
    private static let traces = """
        SELECT a.device_id, encode(a.token_key, 'hex'), encode(a.elsewhere_key, 'hex') FROM tokenkeeper.device_announcement AS a
        UNION ALL
        SELECT h.device_id, encode(p.token_key, 'hex'), encode(p.elsewhere_key, 'hex') FROM tokenkeeper.device_home AS h, unnest(h.places) AS p
        UNION ALL
        SELECT NULL, '', encode(n.elsewhere_key, 'hex') FROM tokenkeeper.device_notice AS n
        """

    @Test func `nothing of a forgotten device remains on any shard, and late messages do not bring it back`() throws {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<4).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        var post = Post()
        var chance = SeededChance(seed: 1)
        for (number, token) in tokens.enumerated() {
            try ledger.execute(
                ledger.shard(of: token),
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => to_timestamp(\(1_700_000_000 + number)), device_id => 'phone')"
            )
            for _ in 0..<20 { try post.step(ledger, &chance) }
        }
        #expect(try ledger.settle() != nil)
        #expect(Set(tokens.map(ledger.shard)).count > 2, "several shards have tokens of the device")
        let current = tokens[11]
        try ledger.execute(ledger.shard(of: current), "SELECT tokenkeeper.forget('\(current)')")
        #expect(try ledger.settle() != nil)
        #expect(try ledger.lines(Self.traces, columns: 3).joined().contains(current) == false)
        for shard in ledger.shards.indices {
            try ledger.execute(shard, "SELECT tokenkeeper.forget_device('phone')")
            for _ in 0..<20 { try post.step(ledger, &chance) }
        }
        #expect(try ledger.settle() != nil)
        try post.repeatSome(ledger, &chance)
        #expect(try ledger.settle() == 0)
        #expect(try ledger.told().isEmpty)
        #expect(try ledger.lines(Self.traces, columns: 3).allSatisfy { $0 == "||" })
        // The home remembers versions for a day.
        for shard in ledger.shards.indices {
            try ledger.execute(shard, "SELECT tokenkeeper.delete_gone_devices(clock_timestamp())")
        }
        #expect(try ledger.lines("SELECT topic_id FROM tokenkeeper.device_home", columns: 1).isEmpty)
    }

    @Test func `only what matters is announced`() throws {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<2).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        let here = tokens.filter { ledger.shard(of: $0) == 0 }
        let there = tokens.filter { ledger.shard(of: $0) == 1 }
        func register(_ token: String, _ at: Int) throws {
            try ledger.execute(
                ledger.shard(of: token),
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => now() - interval '1 day' + '\(at) min', device_id => 'd')"
            )
        }
        try register(here[0], 1)
        #expect(try #require(try ledger.settle()) <= 1, "to its home, if that is the other shard")
        // A launch of the app.
        try register(here[0], 2)
        try register(here[0], 3)
        #expect(try ledger.settle() == 0)
        try register(there[0], 4)
        #expect(try #require(try ledger.settle()) <= 3)
        try register(there[0], 5)
        #expect(try ledger.settle() == 0)
        try register(here[0], 6)
        #expect(try #require(try ledger.settle()) > 0)
        #expect(
            try ledger.lines("SELECT token, state FROM tokenkeeper.token", columns: 2)
                == ["\(here[0])|active", "\(there[0])|superseded"])
    }

    /// What shards say to each other in a fixed order, about one device whose home is the last of them.
    private struct Dialogue {
        let ledger: ShardedLedger
        let device: String
        private let tokens: [String]

        init() throws {
            tokens = (0..<24).map { `One device, one token, on several shards`.token($0) }
            ledger = try ShardedLedger((0..<4).map { _ in try TestCluster.shared.database() }, tokens: tokens)
            device = try deviceOfLast(ledger)
        }

        /// A token of this shard, or another one.
        func token(_ shard: Int, other: Bool = false) throws -> String {
            let found = tokens.filter { ledger.shard(of: $0) == shard }
            return try #require(other ? found.last : found.first)
        }

        func register(_ token: String, _ minute: Int) throws {
            try ledger.execute(
                ledger.shard(of: token),
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => to_timestamp(\(1_700_000_000 + minute * 60)), device_id => '\(device)')"
            )
        }

        func tag(_ shard: Int) throws {
            try ledger.execute(shard, "SELECT tokenkeeper.tag('t', device_id => '\(device)', add => '{news}')")
        }

        /// As if it had been suppressed for long.
        func prune(_ token: String) throws {
            let shard = ledger.shard(of: token)
            try ledger.execute(
                shard,
                """
                SELECT tokenkeeper.unregister('\(token)', 't');
                UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '1 year' WHERE token_key = tokenkeeper.token_key('\(token)')
                """)
            try ledger.sweep(shard)
        }

        func deliver(_ from: Int, _ to: Int) throws {
            try ledger.acknowledge(ledger.deliver(#require(try ledger.package(from: from, to: to))))
        }

        /// The tokens that are not superseded once all messages have arrived.
        func active() throws -> [String] {
            #expect(try ledger.settle() != nil)
            return try ledger.lines("SELECT token FROM tokenkeeper.token WHERE state = 'active'", columns: 1)
        }
    }

    @Test func `a change of tags after a launch of the app leaves one token, although a message is under way`() throws {
        let dialogue = try Dialogue()
        let (first, second) = (try dialogue.token(1), try dialogue.token(2))
        try dialogue.register(first, 1)
        #expect(try dialogue.active() == [first])
        try dialogue.register(second, 2)
        try dialogue.register(first, 3)
        // Its message is the first to tell of the launch, which supersedes the token on shard 2.
        try dialogue.tag(1)
        try dialogue.deliver(2, 3)
        try dialogue.deliver(1, 3)
        #expect(try dialogue.active() == [first])
    }

    @Test func `a notice about tags alone supersedes a token that was registered before what it tells`() throws {
        let dialogue = try Dialogue()
        let (first, last) = (try dialogue.token(0), try dialogue.token(1))
        for (token, minute) in [(first, 10), (last, 20), (try dialogue.token(2), 24), (last, 30)] {
            try dialogue.register(token, minute)
            #expect(try dialogue.active() == [token])
        }
        // The first shard has notice of 20, and not of 30, which it did not have to know.
        try dialogue.register(first, 25)
        try dialogue.tag(1)
        try dialogue.deliver(1, 3)
        try dialogue.deliver(3, 0)
        #expect(try dialogue.active() == [last])
    }

    @Test func `a notice about tags alone revives no token after the current one was pruned`() throws {
        let dialogue = try Dialogue()
        let (current, elsewhere) = (try dialogue.token(1, other: true), try dialogue.token(0))
        try dialogue.register(try dialogue.token(1), 2)
        try dialogue.register(current, 3)
        try dialogue.register(elsewhere, 1)
        try dialogue.deliver(1, 3)
        try dialogue.deliver(0, 3)
        try dialogue.tag(0)
        try dialogue.deliver(0, 3)
        try dialogue.prune(current)
        try dialogue.deliver(3, 1)
        #expect(try dialogue.active() == [], "as in one database")
    }

    @Test func `a notice about a deletion supersedes a token that was revived before it came`() throws {
        let dialogue = try Dialogue()
        let (early, forgotten) = (try dialogue.token(1), try dialogue.token(1, other: true))
        let elsewhere = try dialogue.token(0)
        try dialogue.register(elsewhere, 6)
        try dialogue.register(forgotten, 7)
        try dialogue.register(early, 5)
        #expect(try dialogue.active() == [forgotten])
        try dialogue.ledger.execute(1, "SELECT tokenkeeper.forget('\(forgotten)')")
        try dialogue.deliver(1, 3)
        try dialogue.register(early, 1)
        try dialogue.deliver(1, 3)
        #expect(try dialogue.active() == [elsewhere])
    }

    @Test func `a change of tags between the sweep and its announcement does not hide that a token was deleted`() throws
    {
        let dialogue = try Dialogue()
        let (early, pruned) = (try dialogue.token(1), try dialogue.token(1, other: true))
        let elsewhere = try dialogue.token(0)
        for (token, minute) in [(early, 2), (pruned, 5), (elsewhere, 3)] { try dialogue.register(token, minute) }
        #expect(try dialogue.active() == [pruned])
        try dialogue.prune(pruned)
        try dialogue.tag(1)
        #expect(try dialogue.active() == [])
        try dialogue.register(early, 2)
        #expect(try dialogue.active() == [elsewhere])
    }

    @Test func `a device that the sweep has pruned from one shard keeps its tags there until its last token is pruned`()
        throws
    {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<2).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        let here = try #require(tokens.first { ledger.shard(of: $0) == 0 })
        let there = tokens.filter { ledger.shard(of: $0) == 1 }
        func register(_ token: String, _ daysAgo: Int, _ tags: String = "NULL") throws {
            try ledger.execute(
                ledger.shard(of: token),
                "SELECT tokenkeeper.register('\(token)', 't', registered_at => now() - interval '\(daysAgo) days', device_id => 'd', tags => \(tags))"
            )
        }
        try register(here, 400, "'{news}'")
        try register(there[0], 399)
        #expect(try ledger.settle() != nil)
        let devices = "SELECT device_id FROM tokenkeeper.device"
        let tags = "SELECT token, array_to_string(tags, ',') FROM tokenkeeper.token"
        let age =
            "UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '1 year' WHERE suppressed_since IS NOT NULL"
        try ledger.execute(0, age)
        try ledger.sweep(0)
        #expect(try ledger.lines(tags, columns: 2) == ["\(there[0])|news"], "superseded long ago, so pruned")
        #expect(try ledger.settle() != nil)
        try register(there[1], 398)
        #expect(try ledger.settle() != nil)
        #expect(try Set(ledger.lines(tags, columns: 2)) == ["\(there[0])|", "\(there[1])|news"])
        #expect(try ledger.lines(devices, columns: 1) == ["d", "d"])
        for token in there.prefix(2) { try ledger.execute(1, "SELECT tokenkeeper.unregister('\(token)', 't')") }
        try ledger.execute(1, age)
        try ledger.sweep(1)
        #expect(try ledger.settle() != nil)
        #expect(try ledger.lines(devices, columns: 1).isEmpty)
        #expect(try ledger.lines(Self.traces, columns: 3).allSatisfy { $0 == "||" })
    }

    /// A device whose home is shard 3 of 4.
    private static func deviceOfLast(_ ledger: ShardedLedger) throws -> String {
        let devices = """
            SELECT 'd' || n FROM generate_series(1, 100) AS n WHERE tokenkeeper.home_of(tokenkeeper.device_digest('d' || n), 4) = 3
            """
        return try #require(try ledger.shards[0].connection.lines(devices, columns: 1).first)
    }

    /// Registers tokens of a device on shards, one minute after the other.
    private static func register(_ tokens: [(token: String, tags: String)], _ device: String, _ ledger: ShardedLedger)
        throws
    {
        for (number, next) in tokens.enumerated() {
            try ledger.execute(
                ledger.shard(of: next.token),
                "SELECT tokenkeeper.register('\(next.token)', 't', registered_at => to_timestamp(\(1_700_000_000 + number * 60)), device_id => '\(device)', tags => \(next.tags))"
            )
            #expect(try ledger.settle() != nil)
        }
    }

    @Test func `a shard without tokens of a device does not keep the tags of a forgotten token of another shard`()
        throws
    {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<4).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        let device = try Self.deviceOfLast(ledger)
        let places = try (0..<3).map { shard in try #require(tokens.first { ledger.shard(of: $0) == shard }) }
        let again = try #require(tokens.first { ledger.shard(of: $0) == 0 && $0 != places[0] })
        try Self.register([(places[0], "'{secret}'"), (places[1], "NULL"), (places[2], "NULL")], device, ledger)
        try ledger.execute(
            1,
            "UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '1 year' WHERE suppressed_since IS NOT NULL"
        )
        try ledger.sweep(1)
        #expect(try ledger.settle() != nil)
        let newer = try #require(tokens.first { ledger.shard(of: $0) == 2 && $0 != places[2] })
        try ledger.execute(
            2,
            "SELECT tokenkeeper.register('\(newer)', 't', registered_at => to_timestamp(1700001000), device_id => '\(device)')"
        )
        #expect(try ledger.settle() != nil)
        // One announcement for both: the new registration decides.
        try ledger.execute(
            0,
            "SELECT tokenkeeper.register('\(again)', 't', device_id => '\(device)', tags => '{}'), tokenkeeper.forget('\(places[0])')"
        )
        #expect(try ledger.settle() != nil)
        let rows = """
            SELECT d::text FROM tokenkeeper.device AS d UNION ALL SELECT a::text FROM tokenkeeper.device_announcement AS a
            UNION ALL SELECT h::text FROM tokenkeeper.device_home AS h UNION ALL SELECT l::text FROM tokenkeeper.ledger AS l
            """
        let told = try ledger.lines(rows, columns: 1)
        #expect(told.joined().contains(device))
        #expect(told.filter { $0.contains("secret") } == [])
    }

    @Test(arguments: [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]])
    func `a device whose last token is deleted ends on all shards, in whatever order they are told`(order: [Int]) throws
    {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<4).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        let device = try Self.deviceOfLast(ledger)
        let places = try (0..<4).map { shard in try #require(tokens.first { ledger.shard(of: $0) == shard }) }
        try Self.register(places.map { ($0, "NULL") }, device, ledger)
        for token in places { try ledger.execute(ledger.shard(of: token), "SELECT tokenkeeper.forget('\(token)')") }
        func deliver(from: Int, to: Int) throws {
            guard let package = try ledger.package(from: from, to: to) else { return }
            try ledger.acknowledge(ledger.deliver(package))
        }
        for number in 0...4 {
            for _ in 0..<3 {
                for from in 0..<4 where from != 3 { try deliver(from: from, to: 3) }
                for to in order.prefix(number) { try deliver(from: 3, to: to) }
            }
        }
        #expect(try ledger.settle() != nil)
        #expect(try ledger.lines("SELECT device_id FROM tokenkeeper.device", columns: 1) == [])
        #expect(try ledger.lines(Self.traces, columns: 3).allSatisfy { $0 == "||" })
    }

    @Test func `a device whose last token has moved to another one ends with its tags that no registration followed`()
        throws
    {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<2).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        let places = try (0..<2).map { shard in try #require(tokens.first { ledger.shard(of: $0) == shard }) }
        try Self.register(places.map { ($0, "NULL") }, "d", ledger)
        try Self.register(places.map { ($0, "NULL") }, "e", ledger)
        func tag() throws {
            for shard in 0..<2 {
                try ledger.execute(shard, "SELECT tokenkeeper.tag('t', device_id => 'd', add => '{news}')")
            }
        }
        func prune() throws {
            for shard in 0..<2 {
                try ledger.execute(
                    shard, "UPDATE tokenkeeper.early_tag_change SET noted_at = now() - interval '1 year'")
                try ledger.sweep(shard)
            }
            #expect(try ledger.settle() != nil)
        }
        try tag()
        try ledger.execute(1, "SELECT tokenkeeper.register('\(places[1])', 't', device_id => 'd')")
        try prune()
        #expect(
            try ledger.lines("SELECT device_id FROM tokenkeeper.device WHERE device_id = 'd'", columns: 1) == [
                "d", "d",
            ])
        try ledger.execute(1, "SELECT tokenkeeper.register('\(places[1])', 't', device_id => 'e')")
        try tag()
        try prune()
        #expect(try ledger.lines("SELECT device_id FROM tokenkeeper.device WHERE device_id = 'd'", columns: 1) == [])
        #expect(
            try ledger.lines("SELECT device_id FROM tokenkeeper.device_home WHERE device_id = 'd'", columns: 1) == [])
    }

    @Test func `messages with many long tags are delivered in packages of some megabytes`() throws {
        let ledger = try ShardedLedger((0..<2).map { _ in try TestCluster.shared.database() }, tokens: [Self.token(0)])
        try ledger.execute(
            0,
            """
            SELECT tokenkeeper.register('\(Self.token(0))', 't');
            INSERT INTO tokenkeeper.device_announcement (topic_id, device_digest, device_id, home, version, generation, is_pending, tags_at, tags)
            SELECT 1, tokenkeeper.device_digest('d' || n), 'd' || n, 1, 1, 1, true, now(), ARRAY(
                SELECT rpad('t' || i, 512, 'x') FROM generate_series(1, 1000) AS i)
            FROM generate_series(1, 20) AS n
            """)
        let package = try #require(try ledger.package(from: 0, to: 1))
        #expect(package.messages.utf8.count < 6_000_000)
        #expect(try #require(try ledger.settle()) > 2)
        #expect(
            try ledger.lines("SELECT topic_id FROM tokenkeeper.device_announcement WHERE is_pending", columns: 1)
                .isEmpty)
    }

    @Test func `messages for another shard are refused, and a database that is no shard has none`() throws {
        let tokens = (0..<12).map(Self.token)
        let ledger = try ShardedLedger((0..<2).map { _ in try TestCluster.shared.database() }, tokens: tokens)
        for token in tokens {
            try ledger.execute(
                ledger.shard(of: token), "SELECT tokenkeeper.register('\(token)', 't', device_id => 'd\(token)')")
        }
        var package = try #require(try ledger.package(from: 0, to: 1))
        package.to = 0
        #expect(throws: DatabaseError.self) { try ledger.deliver(package) }
        let whole = try TestCluster.shared.database()
        try whole.psql(
            "SELECT tokenkeeper.register('aa', 't', device_id => 'd'), tokenkeeper.register('bb', 't', device_id => 'd')"
        )
        try whole.psql("SELECT tokenkeeper.forget_device('d')")
        #expect(
            try whole.psql(
                "SELECT (SELECT count(*) FROM tokenkeeper.device_announcement), (SELECT count(*) FROM tokenkeeper.device_home), (SELECT count(*) FROM tokenkeeper.device_check)"
            ) == "0|0|0")
    }
}
