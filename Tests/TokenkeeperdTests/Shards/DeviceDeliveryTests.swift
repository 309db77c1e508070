import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Daemons of several shards` {
    private let shards: [TestDatabase]
    private let folder: TemporaryDirectory
    private let map: String

    init() throws {
        shards = try (0..<2).map { _ in try TestCluster.shared.database() }
        folder = try TemporaryDirectory()
        map = try folder.write(TestShards.mapText(shards), to: "shards.toml")
        for (number, shard) in shards.enumerated() {
            try shard.psql("INSERT INTO tokenkeeper.shard VALUES (\(number), 2)")
        }
    }

    private func daemon(_ number: Int) throws -> DaemonProcess {
        try DaemonProcess(
            shards[number].url(), settings: ["shards.map=\(map)", "sweep.interval=off", "drain.poll_idle=50ms"])
    }

    /// A token of each shard.
    private func tokens() throws -> [String] {
        let all = try shards[0].psql(
            "SELECT string_agg(t, ',' ORDER BY t) FROM (SELECT min(t) AS t FROM (SELECT to_hex(n) || '0' AS t, tokenkeeper.shard_of(to_hex(n) || '0', 2) AS s FROM generate_series(256, 290) AS n) AS u GROUP BY s ORDER BY s) AS v"
        ).split(separator: ",").map(String.init)
        return try all.sorted { try number(of: $0) < number(of: $1) }
    }

    private func number(of token: String) throws -> Int {
        Int(try shards[0].psql("SELECT tokenkeeper.shard_of('\(token)', 2)")) ?? -1
    }

    private func register(_ token: String, minutesAgo: Int) throws {
        try shards[try number(of: token)].psql(
            "SELECT tokenkeeper.register('\(token)', 't', registered_at => now() - interval '\(minutesAgo) min', device_id => 'phone')",
            user: "a_app")
    }

    private func state(_ token: String) throws -> String {
        try shards[try number(of: token)].psql("SELECT state FROM tokenkeeper.token WHERE token = '\(token)'")
    }

    private static let waiting = """
        SELECT (SELECT count(*) FROM tokenkeeper.device_announcement WHERE is_pending) + (SELECT count(*) FROM tokenkeeper.device_notice)
        """

    @Test
    func
        `a device's newest token supersedes those on other shards, and those of a shard that is down as soon as it is back`()
        throws
    {
        let tokens = try tokens()
        var daemons = try (0..<2).map(daemon)
        try register(tokens[0], minutesAgo: 9)
        try register(tokens[1], minutesAgo: 8)
        try eventually("the first is superseded") { try state(tokens[0]) == "superseded" }
        #expect(try state(tokens[1]) == "active")
        // One daemon is killed, and its shard accepts no connections.
        daemons[0].signal(SIGKILL)
        daemons[0].wait()
        try shards[0].psql("ALTER DATABASE \"\(shards[0].name)\" CONNECTION LIMIT 0")
        try shards[0].psql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'a_daemon'",
            user: "postgres")
        try register(tokens[1], minutesAgo: 7)
        try shards[1].psql("SELECT tokenkeeper.forget('\(tokens[1])')", user: "a_app")
        try register(tokens[1], minutesAgo: 6)
        try eventually("what is for the shard that is down waits, and the log names it") {
            try shards[1].psql(Self.waiting) != "0"
                && daemons[1].logged.contains("a shard gets no messages about devices")
        }
        try shards[0].psql("ALTER DATABASE \"\(shards[0].name)\" CONNECTION LIMIT -1", user: "postgres")
        daemons[0] = try daemon(0)
        try eventually("all is delivered") {
            try shards.allSatisfy { try $0.psql(Self.waiting) == "0" }
                && daemons[1].logged.contains("a shard gets messages about devices again")
        }
        try register(tokens[0], minutesAgo: 1)
        try eventually("the second is superseded") { try state(tokens[1]) == "superseded" }
        #expect(try state(tokens[0]) == "active")
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a map that does not fit is an error at the start, or in the log`() throws {
        let missing = try DaemonProcess(shards[0].url(), settings: ["shards.map=\(map).missing"])
        #expect(missing.wait() == 78)
        let other = try folder.write(TestShards.mapText([shards[0]]), to: "one.toml")
        let daemon = try DaemonProcess(shards[0].url(), settings: ["shards.map=\(other)"])
        try eventually("the log says so") { daemon.logged.contains("one of 2 shards, and shards.map has 1") }
        let single = try TestCluster.shared.database()
        let unsharded = try DaemonProcess(single.url(), settings: ["shards.map=\(map)"])
        try eventually("the log says so") { unsharded.logged.contains("this database is no shard") }
        #expect(daemon.stop() == 0)
        #expect(unsharded.stop() == 0)
    }
}
