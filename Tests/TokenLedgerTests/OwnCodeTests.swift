import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Nobody's code but ours runs with our rights: neither the functions that run with the rights of the schema's owner nor the statements of the
/// daemon and the commands call a function outside `pg_catalog` and `tokenkeeper`, by static text or by `EXECUTE`.
@Suite(.ownThread) struct `Our own code` {
    private let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private struct Function {
        let name: String
        let isDefiner: Bool
        let hasParsedBody: Bool
        let settings: String
        /// Without comments.
        let text: String
    }

    private func functions() throws -> [Function] {
        var owner = try database.connect()
        return try owner.lines(
            """
            SELECT p.proname, p.prosecdef, p.prosqlbody IS NOT NULL, coalesce(array_to_string(p.proconfig, '; '), ''),
                   encode(convert_to(p.prosrc, 'UTF8'), 'hex')
            FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace ORDER BY 1
            """, columns: 5
        ).map { line in
            let parts = line.split(separator: "|", omittingEmptySubsequences: false).map(String.init)
            let digits = Array(parts[4].utf8)
            let bytes = stride(from: 0, to: digits.count, by: 2).compactMap {
                UInt8(String(decoding: digits[$0..<($0 + 2)], as: UTF8.self), radix: 16)
            }
            return Function(
                name: parts[0], isDefiner: parts[1] == "t", hasParsedBody: parts[2] == "t", settings: parts[3],
                text: String(decoding: bytes, as: UTF8.self).replacing(#/--.*/#, with: ""))
        }
    }

    /// Functions that put statements together while they run, and of what.
    private static let dynamic = [
        "lock_batch": "names of our partitions, from numbers and the catalog",
        "lock_partition": "the name of a partition of ours",
        "partition_sizes": "names of our partitions",
        "look_at_queue": "names of our partitions",
        "look_at_rows": "the name of a table of ours",
        "prepare_event_months": "months of our history",
        "forget_event_month": "a month of our history",
        "reset_transaction_ids": "a partition of our history, and numbers",
        "unused_topics": "our tables that have a topic_id",
        "unknown_tags": "a tsquery, as a literal",
        "estimated_audience": "a condition of audience_condition, whose values are literals",
        "audience_size": "a condition of audience_condition, whose values are literals",
        "search_audience": "a condition of audience_condition, whose values are literals",
        "tagged_tokens": "constants only",
        "next_of_ledger": "a condition of audience_condition, whose values are literals",
        "audience_share": "constants only",
    ]

    /// Functions that only ever run with the rights of the table's owner who calls them.
    private static let ofTableOwner: Set = [
        "attach", "detach", "read_expression", "read_facts", "sample_rows", "finds_by_index", "hold_name",
        "backfill_next", "next_key", "fails_without_rows", "check_rows", "check_lost",
    ]

    /// Functions in which each name and operator has its schema: a setting would double what they cost. `SchemaTests` sets traps for them.
    private static let qualified: Set = ["parsed_payload", "tag_vector"]

    /// A call of a function with its schema. In `INSERT INTO tokenkeeper.t (a)`, there is a blank.
    private func foreignCalls(in sql: some StringProtocol) -> [String] {
        String(sql).matches(of: #/(?:"[^"\n]+"|[a-z_][a-z_0-9]*)\.(?:"[^"\n]+"|[a-z_][a-z_0-9]*)\(/#).map {
            String($0.output)
        }
        .filter { !$0.hasPrefix("tokenkeeper.") && !$0.hasPrefix("pg_catalog.") }
    }

    @Test func `a function with our rights finds only our names and those of PostgreSQL, and calls nothing else`()
        throws
    {
        let all = try functions()
        #expect(all.count > 100 && all.contains { $0.isDefiner })
        for function in all where !Self.ofTableOwner.contains(function.name) {
            #expect(
                function.hasParsedBody || function.settings.hasPrefix("search_path=pg_catalog, pg_temp")
                    || Self.qualified.contains(function.name),
                "\(function.name): \(function.settings)")
            #expect(foreignCalls(in: function.text).isEmpty, "\(function.name)")
            #expect(
                !function.text.contains(#/set_config\('(?!lock_timeout|enable_|tokenkeeper[.]caller)/#),
                "\(function.name)")
        }
    }

    @Test func `only known functions put statements together while they run, and each of names and values of our own`()
        throws
    {
        let all = try functions()
        let found = Set(all.filter { $0.text.contains(#/\bEXECUTE\s+(?!ON\b|FUNCTION\b)\w*['(\w$]/#) }.map(\.name))
        #expect(found.subtracting(Self.ofTableOwner) == Set(Self.dynamic.keys))
        #expect(!all.contains { $0.isDefiner && Self.ofTableOwner.contains($0.name) })
    }

    @Test func `no object of ours depends on a function, operator or type of another schema`() throws {
        #expect(
            try database.psql(
                """
                SELECT DISTINCT pg_describe_object(d.classid, d.objid, d.objsubid) || ' on ' || pg_describe_object(d.refclassid, d.refobjid, 0)
                FROM pg_depend AS d
                CROSS JOIN LATERAL pg_identify_object(d.classid, d.objid, d.objsubid) AS own
                CROSS JOIN LATERAL pg_identify_object(d.refclassid, d.refobjid, 0) AS other
                WHERE own.schema = 'tokenkeeper' AND other.schema NOT IN ('tokenkeeper', 'pg_catalog', 'pg_toast')
                """) == "")
    }

    /// Swift source without what stands in `\\(…)`.
    private func withoutInterpolations(_ source: String) -> String {
        var (result, depth, last) = ("", 0, Character(" "))
        for character in source {
            if depth > 0 {
                depth += character == "(" ? 1 : character == ")" ? -1 : 0
            } else if last == "\\", character == "(" {
                depth = 1
            } else {
                result.append(character)
            }
            last = character
        }
        return result
    }

    @Test func `no statement in the sources calls a function outside pg_catalog and tokenkeeper`() throws {
        let sources = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
            .deletingLastPathComponent().appendingPathComponent("Sources")
        let files = try FileManager.default.subpathsOfDirectory(atPath: sources.path).filter { $0.hasSuffix(".swift") }
        let literal = #/"""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"/#
        var statements = 0
        for file in files {
            let text = try String(contentsOf: sources.appendingPathComponent(file), encoding: .utf8)
                .replacing(#/(?m)^ *\/\/.*$/#, with: "")
            for found in withoutInterpolations(text).matches(of: literal) {
                let sql = found.output
                guard sql.contains(#/\b(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|CALL|COPY|WITH|SET LOCAL)\b/#) else {
                    continue
                }
                statements += 1
                #expect(foreignCalls(in: sql).isEmpty, "\(file): \(sql)")
            }
        }
        #expect(statements > 100, "\(statements)")
    }
}
