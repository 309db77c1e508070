import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Crashes with queued registrations` {
    /// What applications have committed.
    private struct Books {
        var tokens = 0
        var loggedOut = 0
        var broken = 0

        static func + (left: Books, right: Books) -> Books {
            Books(
                tokens: left.tokens + right.tokens, loggedOut: left.loggedOut + right.loggedOut,
                broken: left.broken + right.broken)
        }
    }

    private final class Shared: Sendable {
        let committed = Mutex(Books())
        let stop = Atomic(false)
    }

    /// A lost row shows as a missing token or logout, a doubled one as a second row in `rejected_registration` or a second event.
    @Test func `every committed registration is applied exactly once, and the queue ends empty`() throws {
        let seed = Seed.next()
        let database = try TestCluster.shared.database()
        let proxy = try CuttingProxy(to: database.cluster.port, seed: seed)
        defer { proxy.close() }
        let url = database.url(port: proxy.port, overTCP: true)
        let shared = Shared()
        let applications = DispatchGroup()
        for application in 0..<3 {
            applications.enter()
            Thread.detachNewThread {
                defer { applications.leave() }
                do {
                    try Self.queue(UInt64(application), seed: seed, into: database, shared)
                } catch {
                    Issue.record(error)
                }
            }
        }

        var chance = SeededChance(seed: seed)
        let settings = ["drain.rejected_per_hour=1000000"]
        var daemons = try (0..<2).map { _ in try DaemonProcess(url, settings: settings) }
        // It continues until the proxy has cut at every moment: the number of COMMITs depends on the machine.
        func isEnough() -> Bool {
            shared.committed.withLock { $0.tokens } > 3000 && proxy.interruptions.withLock { $0.allSatisfy { $0 > 0 } }
        }
        var kills = 0
        while kills < Soak.size(10, whole: 60) || !isEnough() && kills < 600 {
            kills += 1
            // A random moment, on purpose.
            usleep(UInt32.random(in: 0..<250_000, using: &chance))
            let victim = Int.random(in: 0..<daemons.count, using: &chance)
            daemons[victim].signal(SIGKILL)
            #expect(daemons[victim].wait() == -SIGKILL)
            daemons[victim] = try DaemonProcess(url, settings: settings)
        }
        shared.stop.store(true, ordering: .releasing)
        applications.wait()
        proxy.behave()
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0"
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }

        let committed = shared.committed.withLock { $0 }
        print("committed \(committed), cut \(proxy.interruptions.withLock { $0 })")
        #expect(
            try database.psql(
                "SELECT count(*), count(*) FILTER (WHERE state = 'unregistered_by_app') FROM tokenkeeper.token")
                == "\(committed.tokens)|\(committed.loggedOut)")
        #expect(
            try database.psql(
                "SELECT count(*), count(DISTINCT token) FROM tokenkeeper.rejected_registration")
                == "\(committed.broken)|\(committed.broken)")
        // A logout that comes before its registration leaves an event of each.
        #expect(
            try database.psql(
                "SELECT count(*) - count(DISTINCT token_key) FROM tokenkeeper.token_event WHERE event = 'registered'")
                == "0")
    }

    private static func queue(
        _ application: UInt64, seed: UInt64, into database: TestDatabase, _ shared: Shared
    ) throws {
        var chance = SeededChance(seed: seed &+ application &+ 1)
        var app = try database.connect(user: "a_app")
        var next = 0
        while !shared.stop.load(ordering: .acquiring) {
            usleep(UInt32.random(in: 0..<4_000, using: &chance))
            var books = Books()
            var rows: [String] = []
            for _ in 0..<Int.random(in: 1...60, using: &chance) {
                next += 1
                let token = String(application << 40 | UInt64(next), radix: 16)
                let padded = String(repeating: "0", count: 16 - token.count) + token
                switch Int.random(in: 0..<10, using: &chance) {
                case 0:
                    books.broken += 1
                    rows.append("('t', 'broken \(padded)', now(), NULL)")
                case 1, 2:
                    books.tokens += 1
                    books.loggedOut += 1
                    rows.append("('t', '\(padded)', '2026-01-02Z', true)")
                    rows.append("('t', '\(padded)', '2026-01-01Z', NULL)")
                default:
                    books.tokens += 1
                    rows.append("('t', '\(padded)', now(), NULL)")
                }
            }
            let insert =
                "INSERT INTO tokenkeeper.registration (topic, token, registered_at, unregistered) VALUES "
                + rows.joined(separator: ", ")
            if Int.random(in: 0..<10, using: &chance) == 0 {
                try app.execute("BEGIN; \(insert); ROLLBACK")
            } else {
                try app.execute(insert)
                shared.committed.withLock { $0 = $0 + books }
            }
        }
    }
}
