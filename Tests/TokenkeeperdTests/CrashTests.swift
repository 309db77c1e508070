import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Crashes` {
    /// The results that a producer has committed, by status.
    private final class Books: Sendable {
        let committed = Mutex<[Int: Int]>([:])
        let stop = Atomic(false)
    }

    /// Three daemons behind a proxy that cuts connections around COMMIT, 60 times `kill -9` in the full soak, and producers that
    /// commit out of order.
    @Test func `every committed result is recorded exactly once, and the queue ends empty`() throws {
        let seed = Seed.next()
        let database = try TestCluster.shared.database()
        let proxy = try CuttingProxy(to: database.cluster.port, seed: seed)
        defer { proxy.close() }
        let url = database.url(port: proxy.port, overTCP: true)
        let books = Books()
        let producers = DispatchGroup()
        for producer in 0..<4 {
            Thread.detachNewThread { [database, books] in
                producers.enter()
                defer { producers.leave() }
                do {
                    try Self.produce(UInt64(producer), seed: seed, into: database, books)
                } catch {
                    Issue.record(error)
                }
            }
        }

        var chance = SeededChance(seed: seed)
        var daemons = try (0..<3).map { _ in try DaemonProcess(url, settings: Self.settings) }
        // It continues until the proxy has cut at every moment: the number of COMMITs depends on the machine.
        func isEnough() -> Bool {
            books.committed.withLock { $0.values.reduce(0, +) } > 10_000
                && proxy.interruptions.withLock { $0.allSatisfy { $0 > 0 } }
        }
        var kills = 0
        while kills < Soak.size(20, whole: 60) || !isEnough() && kills < 600 {
            kills += 1
            // A random moment, on purpose.
            usleep(UInt32.random(in: 0..<250_000, using: &chance))
            let victim = Int.random(in: 0..<daemons.count, using: &chance)
            daemons[victim].signal(SIGKILL)
            #expect(daemons[victim].wait() == -SIGKILL)
            daemons[victim] = try DaemonProcess(url, settings: Self.settings)
        }
        books.stop.store(true, ordering: .releasing)
        producers.wait()
        proxy.behave()
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0"
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }

        let committed = books.committed.withLock { $0 }
        let interruptions = proxy.interruptions.withLock { $0 }
        print("committed \(committed), cut before COMMIT, before its reply, after it: \(interruptions)")
        #expect(committed.values.reduce(0, +) > 10_000)
        #expect(interruptions.allSatisfy { $0 > 0 })
        for (status, count) in committed {
            #expect(
                try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = \(status)")
                    == "\(count)", "status \(status)")
        }
        #expect(
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "\(committed.values.reduce(0, +))")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "\(committed[410] ?? 0)")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "\(committed[999] ?? 0)")
        #expect(
            try database.psql("SELECT count(DISTINCT token) FROM tokenkeeper.rejected_result")
                == "\(committed[999] ?? 0)")
    }

    /// All garbage is kept, so that it can be counted.
    private static let settings = ["drain.rejected_per_hour=1000000"]

    /// Each 410 and each garbage row has its own token, so that a lost row and a doubled row both show.
    private static func produce(_ producer: UInt64, seed: UInt64, into database: TestDatabase, _ books: Books) throws {
        var chance = SeededChance(seed: seed &+ producer &+ 1)
        var sender = try database.connect(user: "a_sender")
        var held: [(connection: TestConnection, results: [Int: Int])] = []
        var next = 0
        func settle(_ connection: TestConnection, _ results: [Int: Int]) throws {
            try connection.commit()
            books.committed.withLock { $0.merge(results, uniquingKeysWith: +) }
        }
        while !books.stop.load(ordering: .acquiring) {
            // Many small transactions rather than few large ones: more COMMITs to cut.
            usleep(UInt32.random(in: 0..<4_000, using: &chance))
            let count = Int.random(in: 1...200, using: &chance)
            var results: [Int: Int] = [:]
            var rows: [String] = []
            for _ in 0..<count {
                let status = [200, 200, 200, 410, 410, 999].randomElement(using: &chance)!
                results[status, default: 0] += 1
                next += 1
                rows.append(
                    "('t', lpad('\(String(producer << 40 | UInt64(next), radix: 16))', 16, '0'), \(status), \(goneBody))"
                )
            }
            let insert =
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES \(rows.joined(separator: ","))"
            switch Int.random(in: 0..<20, using: &chance) {
            case 0 where held.count < 5:
                // Held open for a while, so that it commits after later ones.
                let late = TestConnection(try database.connect(user: "a_sender"))
                try late.begin(insert)
                held.append((late, results))
            case 1:
                try sender.execute("BEGIN; \(insert); ROLLBACK")
            default:
                try sender.execute(insert)
                books.committed.withLock { $0.merge(results, uniquingKeysWith: +) }
            }
            if held.count > 0, Int.random(in: 0..<10, using: &chance) == 0 {
                let (connection, results) = held.removeFirst()
                try settle(connection, results)
            }
        }
        for (connection, results) in held { try settle(connection, results) }
    }

    /// Lets an array hold a connection, which is noncopyable.
    private final class TestConnection {
        private var connection: Connection
        init(_ connection: consuming Connection) { self.connection = connection }
        func begin(_ statement: String) throws { try connection.execute("BEGIN; \(statement)") }
        func commit() throws { try connection.execute("COMMIT") }
    }
}
