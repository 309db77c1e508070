import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// The recipe of `docs/how-to/shard.md` for the tokens of a database that becomes too small.
@Suite(.ownThread) struct `Tokens of one database` {
    private static let sendable = """
        SELECT concat_ws('|', token, topic, environment, registered_at, device_id, user_id, tags) FROM tokenkeeper.token WHERE sendable
        """

    /// The statement that exports, as the page has it.
    private static func export() throws -> String {
        let page = try String(
            contentsOf: URL(fileURLWithPath: #filePath).deletingLastPathComponent()
                .appendingPathComponent("../../../docs/how-to/shard.md"), encoding: .utf8)
        let match = try #require(page.firstMatch(of: #/psql -XAtc "(COPY [^"]+)"/#))
        return String(match.output.1)
    }

    @Test func `move into shards by the recipe: what is sendable stays as it is, and what is suppressed stays so`()
        throws
    {
        let old = try TestCluster.shared.database()
        func token(_ number: Int) -> String { String(repeating: "ab", count: 30) + String(format: "%04x", number) }
        for number in 1...40 {
            try old.psql(
                """
                SELECT tokenkeeper.register('\(token(number))', 't', registered_at => '2026-01-01Z'::timestamptz + interval '1 hour' * \(number),
                    device_id => 'd\(number % 36)', user_id => 'user "\(number)", x', tags => '{news,"a, b"}')
                """, user: "a_app")
        }
        try old.psql(
            "SELECT tokenkeeper.register('\(token(41))', 't', 'sandbox', registered_at => '2026-02-01Z')", user: "a_app"
        )
        try old.psql("SELECT tokenkeeper.unregister('\(token(20))', 't', at => '2026-03-01Z')", user: "a_app")
        try old.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', '\(token(21))', 410, '{"reason":"Unregistered","timestamp":1772323200000}')
            """, user: "a_sender")
        let daemon = try old.daemon()
        let states =
            "SELECT string_agg(state || ' ' || count, ', ' ORDER BY state) FROM (SELECT state, count(*) FROM tokenkeeper.token GROUP BY state) AS s"
        try eventually("all is recorded") {
            try old.psql(states) == "active 35, stale 1, superseded 4, unregistered_by_app 1"
        }
        #expect(daemon.stop() == 0)

        let stage = try TestShards()
        let folder = try TemporaryDirectory()
        let file = try folder.write(try old.psql(Self.export(), user: "a_reader", input: "") + "\n", to: "tokens.csv")
        let imported = try stage.routers[0].command("import", file, "--format", "csv", as: "a_app")
        #expect(imported.status == 0, "\(imported)")
        let daemons = try stage.shards.map { try $0.daemon() }
        try eventually("every registration is recorded") {
            try stage.shards.allSatisfy { try $0.psql("SELECT tokenkeeper.queued_registrations(1)") == "0" }
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
        let there = try stage.shards.flatMap { try $0.psql(Self.sendable).split(separator: "\n") }.sorted()
        #expect(try there == old.psql(Self.sendable).split(separator: "\n").sorted())
        let suppressed = try old.psql("SELECT token FROM tokenkeeper.token WHERE NOT sendable").split(separator: "\n")
        #expect(suppressed.count == 6)
        for token in suppressed {
            #expect(
                try stage.routers[1].psql("SELECT tokenkeeper.is_sendable('\(token)', 't')", user: "a_sender") == "f")
        }
    }
}
