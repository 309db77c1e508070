import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// The statements of the README and of the tutorial, one after the other, with the results that the pages show.
@Suite(.ownThread) struct `The statements of a page` {
    enum Place: String, CaseIterable, CustomTestStringConvertible {
        case oneDatabase = "one database"
        case router = "a router"

        var testDescription: String { rawValue }
    }

    /// A statement of a page, and the rows that the page shows as its result, their cells joined by `|`; nil if it shows none.
    private struct Statement {
        var sql: String
        var shown: [String]?

        /// Who runs it.
        var user: String {
            let rights = [
                ("register(", "a_app"), ("INTO", "a_sender"), ("sendable(", "a_sender"), ("enqueue(", "a_sender"),
            ]
            return rights.first { sql.contains($0.0) }?.1 ?? "a_reader"
        }
    }

    /// An application with its database, and the daemons behind it.
    private struct Application {
        private let stage: SendingStage
        private let daemons: [DaemonProcess]
        let shards: [TestDatabase]
        /// Where the application connects.
        let database: TestDatabase
        private let folder: TemporaryDirectory

        init(_ place: Place) throws {
            stage = try SendingStage()
            folder = try TemporaryDirectory()
            let settings = stage.servers + stage.key + ["guard.max_share=100%"]
            switch place {
            case .oneDatabase:
                (database, shards) = (stage.database, [stage.database])
                daemons = [try database.daemon(settings)]
            case .router:
                let all = try TestShards()
                (database, shards) = (all.routers[0], all.shards)
                let map = try folder.write(TestShards.mapText(shards), to: "shards.toml")
                daemons = try shards.map { try $0.daemon(settings + ["shards.map=\(map)"]) }
            }
        }

        /// Runs a statement as its user, and then waits until what it has queued is recorded.
        func run(_ statement: Statement) throws -> [String] {
            let told = try database.psql(
                "SET client_min_messages = error; SET timezone = 'UTC'; \(statement.sql)", user: statement.user)
            if statement.sql.contains("INSERT") { try TestShards.settle(shards) }
            if statement.sql.contains("register(") {
                // The statements write instants in whole milliseconds, rounded down.
                try eventually("it is two milliseconds later") {
                    try database.psql(
                        "SELECT max(registered_at) < clock_timestamp() - interval '2 ms' FROM tokenkeeper.token",
                        user: "a_reader") == "t"
                }
            }
            return `The statements of a page`.withoutInstants(
                told.split(separator: "\n", omittingEmptySubsequences: false).map(String.init))
        }
    }

    /// The statements of each block of SQL of a text, with the text block that follows.
    private static func statements(of text: String) -> [Statement] {
        var found: [Statement] = []
        for block in text.matches(of: #/(?m)^```(sql|text)\n((?s).*?)\n```$/#) {
            let body = String(block.output.2)
            if block.output.1 == "text" {
                if !found.isEmpty { found[found.count - 1].shown = rows(body) }
                continue
            }
            // A comment after a statement shows its result.
            for part in body.matches(of: #/(?s)(.+?)(?:;|\\gx)(?: *-- ([^\n]*))?(?:\n|$)/#) {
                let shown = part.output.2.map { [$0 == "false" ? "f" : String($0)] }
                found.append(
                    Statement(sql: part.output.1.trimmingCharacters(in: .whitespacesAndNewlines), shown: shown))
            }
        }
        return found
    }

    /// The rows of a table as psql prints it, aligned or expanded; nil for another text.
    private static func rows(_ text: String) -> [String]? {
        let lines = text.split(separator: "\n")
        func cells(_ line: Substring) -> [String] {
            line.split(separator: "|", omittingEmptySubsequences: false).map { $0.trimmingCharacters(in: .whitespaces) }
        }
        if lines[0].hasPrefix("-[ RECORD") { return [lines.dropFirst().map { cells($0)[1] }.joined(separator: "|")] }
        guard lines.count > 2, lines[1].hasPrefix("---") else { return nil }
        return lines.dropFirst(2).prefix { !$0.hasPrefix("(") }.map { cells($0).joined(separator: "|") }
    }

    /// Instants differ from run to run.
    private static func withoutInstants(_ rows: [String]) -> [String] {
        rows.map { $0.replacing(#/\d{4}-\d\d-\d\d [\d:.]+\+00/#, with: "(instant)") }
    }

    private static func page(_ name: String) throws -> String {
        try String(contentsOf: PackagedProgram.repository.appendingPathComponent(name), encoding: .utf8)
    }

    @Test(arguments: Place.allCases)
    func `of the README have the results that it shows`(place: Place) throws {
        let page = try Application(place)
        let section = try #require(try Self.page("README.md").firstMatch(of: #/(?s)## Use it from SQL\n.*?\n## /#))
        let statements = Self.statements(of: String(section.output))
        #expect(statements.count == 5 && statements.filter { $0.shown != nil }.count == 2, "\(statements)")
        var last: [String] = []
        for statement in statements {
            last = try page.run(statement)
            if let shown = statement.shown { #expect(last == shown, "\(statement.sql)") }
        }
        // The last statement began a campaign. On a router, its number need not be 1.
        let campaign = try #require(last.first)
        #expect(place == .router || campaign == "1")
        let show = try page.database.command("campaign", "show", campaign, "--watch", as: "a_reader")
        #expect(show.status == 0 && show.output.contains("campaign \(campaign) to com.example.app"), "\(show)")
    }

    @Test(arguments: Place.allCases)
    func `of the tutorial have the results that it shows`(place: Place) throws {
        let page = try Application(place)
        let statements = Self.statements(of: try Self.page("docs/tutorial.md"))
        #expect(statements.count == 15 && statements.filter { $0.shown != nil }.count == 9, "\(statements)")
        for statement in statements {
            if statement.sql.contains("campaign_progress") {
                try eventually("the campaign has ended") { try page.run(statement).joined().contains("|ended|") }
            }
            var told = try page.run(statement)
            guard var shown = statement.shown.map(Self.withoutInstants) else { continue }
            if place == .router, statement.sql.contains("SELECT *") {
                // The views of a router have the number of the shard in a last column.
                told = told.map { $0.replacing(#/\|[0-3]$/#, with: "") }
            }
            if statement.sql.contains("campaign_progress") {
                // The sample makes campaigns as well, so the number is any.
                shown = shown.filter { $0.contains("Breakfast") }.map { $0.replacing(#/^\d+/#, with: "") }
                told = told.map { $0.replacing(#/^\d+/#, with: "") }
            } else if statement.sql.contains("tokenkeeper.status") {
                // The page counts the sample's tokens, and here they are counted only from time to time.
                let cells = told[0].split(separator: "|")
                #expect(cells.count == 5 && cells[2...] == ["0", "\(page.shards.count)", "{}"], "\(told)")
                continue
            }
            #expect(told == shown, "\(statement.sql)")
        }
    }
}
