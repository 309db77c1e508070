import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Several routers at once` {
    private static let tokens = 12
    private static let devices = 3

    /// Three applications register, move and log out tokens of the same few devices, through two routers and at once, while messages are delivered. Each
    /// call has an instant, so the end does not depend on the order.
    @Test func `leave what the model says of registrations of the same devices`() throws {
        let seed =
            ProcessInfo.processInfo.environment["MODEL_SEED"].flatMap(UInt64.init)
            ?? UInt64.random(in: 0...UInt64(UInt32.max))
        var chance = SeededChance(seed: seed)
        let stage = try TestShards(migrated: false)
        let tokens = (0..<Self.tokens).map { String(0x100 + $0, radix: 16) + "0" }
        let ledger = try ShardedLedger(stage.shards, tokens: tokens)
        for router in stage.routers { try stage.migrate(router) }
        #expect(Set(tokens.map(ledger.shard)).count == stage.shards.count, "all shards have tokens")
        var model = LedgerModel()
        let calls = (0..<3).map { _ in Self.calls(topics: Soak.size(12, whole: 60), &model, &chance) }
        let failures = Failures()
        let applications = DispatchGroup()
        for (number, calls) in calls.enumerated() {
            applications.enter()
            Thread.detachNewThread { [router = stage.routers[number % stage.routers.count]] in
                defer { applications.leave() }
                do {
                    var app = try router.connect(user: "a_app")
                    for call in calls { try app.execute(call) }
                } catch {
                    failures.add("application \(number): \(error)")
                }
            }
        }
        let delivery = Result {
            while applications.wait(timeout: .now()) == .timedOut { try Self.deliverSome(of: ledger, &chance) }
        }
        applications.wait()
        try delivery.get()
        #expect(failures.all == [], "seed \(seed)")
        let wanted = try ledger.expectToSettle(as: model, seed: seed)
        #expect(wanted.contains { $0.contains("|superseded|") }, "seed \(seed)")
    }

    /// What an application calls, and the model applies: a few calls for each topic, so that the last ones of many devices come at once.
    private static func calls(
        topics: Int, _ model: inout LedgerModel, _ chance: inout SeededChance
    ) -> [String] {
        (0..<topics * 15).map { number in
            let topic = number / 15
            // With three instants, most registrations tie.
            let instants = topic % 2 == 0 ? 400 : 3
            if Int.random(in: 0..<6, using: &chance) == 0 {
                let change = QueuedRegistration.TagCall.random(
                    "t\(topic)", tokens: tokens, devices: devices, instants: instants, &chance)
                change.apply(to: &model)
                return change.call
            }
            let row = QueuedRegistration.random(
                "t\(topic)", tokens: tokens, devices: devices, instants: instants, &chance)
            row.apply(to: &model)
            return row.call
        }
    }

    /// As the daemon of a random shard does.
    private static func deliverSome(of ledger: ShardedLedger, _ chance: inout SeededChance) throws {
        let from = Int.random(in: ledger.shards.indices, using: &chance)
        try ledger.check(from)
        for to in ledger.shards.indices {
            if let package = try ledger.package(from: from, to: to) { try ledger.acknowledge(ledger.deliver(package)) }
        }
    }
}
