import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import TokenLedger

/// Follows docs/how-to/move-a-shard.md: a server with two shards, of which one moves to a standby of the whole server.
@Suite(.ownThread) struct `Moving a shard` {
    /// What the application has done. It repeats what fails, with the same instants and the same apns_id.
    private final class Application: Sendable {
        struct Books {
            var tokens = 0
            /// Calls that failed and were repeated.
            var failures = 0
            /// The longest that a call had to be repeated.
            var pause = Duration.zero
        }

        let books = Mutex(Books())
        let stop = Atomic(false)

        static func token(_ number: Int) -> String {
            String(format: "%08x", 0x1000_0000 + number &* 2_654_435 % 0x0FFF_FFFF)
        }

        func run(_ router: TestDatabase) throws {
            var app = try router.connect(user: "a_app")
            var sender = try router.connect(user: "a_sender")
            var number = 0
            while !stop.load(ordering: .acquiring) {
                let token = Self.token(number)
                let apnsID = String(format: "00000000-0000-4000-8000-%012x", number)
                try untilDone {
                    try app.execute(
                        "SELECT tokenkeeper.register('\(token)', 't', 'production', to_timestamp(1700000000), 'd\(number / 2)')"
                    )
                }
                try untilDone {
                    try sender.execute(
                        """
                        INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at) VALUES ('t', '\(token)',
                            \(number % 3 == 0 ? #"'410', '{"reason":"Unregistered","timestamp":1700000100000}'"# : "'200', NULL"), now())
                        """)
                }
                try untilDone {
                    try sender.execute(
                        "INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id) VALUES ('t', '\(token)', '{\"aps\":{}}', '\(apnsID)')"
                    )
                }
                number += 1
                books.withLock { $0.tokens = number }
            }
        }

        private func untilDone(_ call: () throws -> Void) throws {
            let clock = ContinuousClock()
            let start = clock.now
            try eventually("a call through the router succeeds") {
                do {
                    try call()
                    return true
                } catch is DatabaseError {
                    books.withLock { $0.failures += 1 }
                    return false
                }
            }
            let took = start.duration(to: clock.now)
            books.withLock { $0.pause = max($0.pause, took) }
        }
    }

    private let page: String
    private let old: TestCluster
    private let shards: [TestDatabase]
    private let router: TestDatabase
    private let folder: TemporaryDirectory

    init() throws {
        page = try String(
            contentsOf: PackagedProgram.repository.appendingPathComponent("docs/how-to/move-a-shard.md"),
            encoding: .utf8)
        let cluster = try TestCluster.prepared()
        old = cluster
        shards = try (0..<2).map { _ in try cluster.database() }
        router = try TestCluster.prepared().database(migrated: false)
        folder = try TemporaryDirectory()
    }

    /// A statement of the page, for the database of this test.
    private func statement(_ text: String, of shard: TestDatabase, as name: String) throws -> String {
        try #require(page.contains(text), "the page has: \(text)")
        return text.replacing(name, with: shard.name)
    }

    private func route(_ shards: [TestDatabase]) throws -> String {
        var connection = try router.connect(user: "postgres")
        let release = Version(major: 0, minor: 1, patch: 0)
        let map = try ShardMap(shards.map(TestShards.connection))
        #expect(try Router(to: map, shardUser: "owner", daemon: release).migrate(&connection))
        return try folder.write(TestShards.mapText(shards), to: "\(UUID().uuidString).toml")
    }

    private func daemon(_ shard: TestDatabase, _ map: String) throws -> DaemonProcess {
        try DaemonProcess(
            shard.url(),
            settings: [
                "shards.map=\(map)", "sweep.interval=off", "drain.poll_idle=50ms", "guard.hold_stale_share=100%",
            ])
    }

    @Test func `loses nothing that arrives meanwhile, and counts nothing twice in the ledger`() throws {
        let oldMap = try route(shards)
        var daemons = try shards.map { try daemon($0, oldMap) }
        let application = Application()
        let done = DispatchGroup()
        done.enter()
        Thread.detachNewThread { [router] in
            defer { done.leave() }
            do { try application.run(router) } catch { Issue.record(error) }
        }
        func tokens() -> Int { application.books.withLock(\.tokens) }
        try eventually("results arrive") { tokens() > 200 }
        #expect(page.contains(" --create-slot --slot=move_shards "))
        let new = try TestCluster(standbyOf: old, slot: "move_shards")
        let moved = TestDatabase(cluster: new, name: shards[1].name)
        try eventually("more arrive while the standby follows") { tokens() > 400 }

        var onOld = try old.connect(database: "postgres")
        var onNew = try new.connect(database: "postgres", writes: false)
        #expect(daemons[1].stop() == 0)
        for text in [
            "ALTER DATABASE tokens02 ALLOW_CONNECTIONS false;",
            "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE datname = 'tokens02';",
        ] { try onOld.execute(statement(text, of: shards[1], as: "tokens02")) }
        let position = try #require(
            try onOld.scalar(statement("SELECT pg_current_wal_insert_lsn();", of: shards[1], as: "tokens02")))
        let hasAll = try statement(
            "SELECT pg_last_wal_replay_lsn() >= 'B/4D0A1F88' AS has_all;", of: shards[1], as: "tokens02")
        try eventually("the standby has everything") {
            try onNew.scalar(hasAll.replacing("B/4D0A1F88", with: position)) == "t"
        }
        try onNew.execute(statement("SELECT pg_promote();", of: shards[1], as: "tokens02"))
        try onNew.execute(statement("ALTER DATABASE tokens00 ALLOW_CONNECTIONS false;", of: shards[0], as: "tokens00"))
        try onNew.execute(statement("ALTER DATABASE tokens02 ALLOW_CONNECTIONS true;", of: shards[1], as: "tokens02"))
        let newMap = try route([shards[0], moved])
        #expect(daemons[0].stop() == 0)
        daemons = [try daemon(shards[0], newMap), try daemon(moved, newMap)]

        let before = tokens()
        try eventually("results arrive again") { tokens() > before + 200 }
        application.stop.store(true, ordering: .releasing)
        done.wait()
        try onOld.execute(statement("SELECT pg_drop_replication_slot('move_shards');", of: shards[1], as: "tokens02"))
        #expect(try onOld.scalar("SELECT count(*) FROM pg_replication_slots") == "0")
        for setting in ["primary_conninfo", "primary_slot_name"] {
            try onNew.execute(statement("ALTER SYSTEM RESET \(setting);", of: shards[1], as: "tokens02"))
        }
        try onOld.execute(statement("DROP DATABASE tokens02;", of: shards[1], as: "tokens02"))
        try onNew.execute(statement("DROP DATABASE tokens00;", of: shards[0], as: "tokens00"))

        let books = application.books.withLock { $0 }
        print("\(books.tokens) tokens, \(books.failures) calls were repeated, for \(books.pause) at most")
        #expect(books.failures > 0)
        func sum(_ query: String) throws -> Int {
            try [shards[0], moved].reduce(0) { $0 + (Int(try $1.psql(query)) ?? -1_000_000) }
        }
        try TestShards.settle([shards[0], moved])
        #expect(try sum("SELECT count(*) FROM tokenkeeper.ledger") == books.tokens)
        #expect(
            try sum("SELECT count(*) FROM tokenkeeper.token WHERE state = 'stale'") == (books.tokens + 2) / 3,
            "each 410 counts")
        let results = try sum("SELECT sum(results) FROM tokenkeeper.result_stat")
        #expect(
            (books.tokens...books.tokens + books.failures).contains(results), "\(results) results of \(books.tokens)")
        #expect(
            try sum("SELECT count(*) FROM tokenkeeper.send_request") == books.tokens, "each request is there once")
        // Of the two tokens of a device, one is superseded, unless a 410 has come to it.
        let tables = try [shards[0], moved].flatMap {
            try $0.psql("SELECT device_id, state FROM tokenkeeper.token WHERE state <> 'superseded'").split(
                separator: "\n")
        }
        let current = Dictionary(grouping: tables) { $0.prefix { $0 != "|" } }
        #expect(current.values.allSatisfy { $0.count { $0.hasSuffix("|active") } <= 1 })
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }
}
