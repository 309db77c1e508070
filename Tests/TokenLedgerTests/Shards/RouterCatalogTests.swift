import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What an application finds on a router is what it finds on a shard, but for what is listed here and in docs/how-to/shard.md.
@Suite(.ownThread) struct `The functions of a router` {
    /// These say only that a router has no attached tables.
    private static let refusing = ["attach", "compare", "detach", "reconcile", "restore_cleaned", "set_cleaning"]

    /// What is not there, and why. None of it is for people.
    private static let missing: [(why: String, names: Set<String>)] = [
        (
            "the commands for attached tables and imports call them, and connect to a shard",
            [
                "add_counts", "advance_source", "attachment_findings", "attachment_named", "attachment_of",
                "attachment_statements",
                "backfill_next", "begin_attachment", "begin_backfill", "begin_source", "cascading_keys",
                "changed_column_test",
                "check_attachment_plan", "column_kind", "compare_all", "compare_next", "comparison_findings",
                "differences",
                "end_attachment", "finish_comparison", "has_before_update", "made_by", "mark_of",
                "parse_row_expression",
                "queued_registrations", "read_attachment", "refused_by", "table_named",
                "token_index_operator",
                "trigger_body", "update_statements", "withdraw",
            ]
        ),
        (
            "the views of the shards call them",
            [
                "read_status", "reason_of", "sending_fault", "state_of", "topic_fault",
            ]
        ),
        (
            "the functions of campaigns of routers call them on the shards",
            ["audience_part", "check_campaign", "create_campaign"]
        ),
    ]

    /// One line per function that one of the roles may call: name, arguments with defaults, result and callers.
    private static let functions = """
        SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), array_agg(DISTINCT g.grantee::regrole::text) AS callers
        FROM pg_proc AS p, aclexplode(p.proacl) AS g
        WHERE p.pronamespace = 'tokenkeeper'::regnamespace
          AND g.grantee::regrole::text IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator')
        GROUP BY p.oid ORDER BY 1, 2
        """

    @Test func `have the names, arguments, results and callers of a shard's, and none is forgotten`() throws {
        let stage = try TestShards()
        var shard = try stage.shards[0].connect()
        var router = try stage.routers[0].connect(user: "postgres")
        let onShard = try shard.lines(Self.functions, columns: 4)
        let onRouter = try router.lines(Self.functions, columns: 4)
        func name(_ line: String) -> String { line.split(separator: "|").first.map(String.init) ?? "" }
        let missing = Self.missing.reduce(into: Set<String>()) { $0.formUnion($1.names) }
        // A default that is the time is the shard's: null.
        let expected = onShard.filter { !missing.contains(name($0)) }.map {
            $0.replacingOccurrences(of: "DEFAULT clock_timestamp()", with: "DEFAULT NULL::timestamp with time zone")
        }.map { line in
            // Only on a router, a token can have no answer.
            guard name(line) == "sendable" else { return line }
            let parts = line.split(separator: "|", omittingEmptySubsequences: false).map(String.init)
            return ([parts[0], parts[1] + ", unanswered text DEFAULT 'error'::text"] + parts[2...]).joined(
                separator: "|")
        }
        #expect(
            Set(expected) == Set(onRouter.filter { name($0) != "shard_count" }),
            "\(Set(expected).symmetricDifference(onRouter))")
        #expect(missing.isSubset(of: onShard.map(name)), "\(missing.subtracting(onShard.map(name))) are gone")
        #expect(expected.count > 10)

        let bare = try router.scalar(
            """
            SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc AS p
            WHERE p.pronamespace IN ('tokenkeeper'::regnamespace, 'tokenkeeper_shard'::regnamespace) AND obj_description(p.oid, 'pg_proc') IS NULL
              AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.objid = p.oid AND d.deptype = 'e')
            """)
        #expect(bare == nil, "these have no comment")
    }

    /// What people may read on a shard and not on a router, and why.
    private static let missingRelations: [(why: String, names: Set<String>)] = [
        (
            "attached tables and imports are in the database where they are",
            [
                "attachment", "attachment_cleaning", "cleaned", "cleaning", "own_attachment", "own_cleaning",
                "sweep_table",
                "dropped_registration", "registration_source",
            ]
        ),
        ("it has the parts of the shards; campaign_progress shows whole campaigns", ["campaign"]),
        ("they are about one database; the view router is about this one", ["migration", "repeatable", "shard"]),
        ("an operator reads the requests that wait on each shard", ["send_request"]),
    ]

    @Test func `stand beside all relations that people read on a shard`() throws {
        let stage = try TestShards()
        let relations = """
            SELECT DISTINCT c.relname FROM pg_class AS c, aclexplode(c.relacl) AS g
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('v', 'r', 'p') AND NOT c.relispartition
              AND g.privilege_type = 'SELECT'
              AND g.grantee::regrole::text IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator')
            """
        func names(_ database: TestDatabase, _ user: String) throws -> Set<String> {
            Set(try database.psql(relations, user: user).split(separator: "\n").map(String.init))
        }
        let missing = Self.missingRelations.reduce(into: Set<String>()) { $0.formUnion($1.names) }
        let (onShard, onRouter) = (try names(stage.shards[0], "owner"), try names(stage.routers[0], "postgres"))
        // Grants of columns, such as INSERT into the queues, are not among these.
        #expect(onShard.subtracting(onRouter) == missing)
    }

    @Test func `that only refuse are named in the documentation`() throws {
        let page = try String(
            contentsOf: URL(fileURLWithPath: #filePath).deletingLastPathComponent()
                .appendingPathComponent("../../../docs/how-to/shard.md"), encoding: .utf8)
        for name in Self.refusing { #expect(page.contains("`\(name)`"), "\(name)") }
    }
}
