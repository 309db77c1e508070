import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `Command explain` {
    private static let token = "aabbccdd" + String(repeating: "0", count: 55) + "9"

    private func explain(
        _ arguments: [String], on url: String, environment: [String: String] = [:]
    ) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "explain"] + arguments,
            environment: environment.merging(["TOKENKEEPER_DATABASE_URL": url]) { $1 })
    }

    private func deadToken(on cluster: TestCluster = .shared) throws -> TestDatabase {
        let database = try cluster.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('\(Self.token)', 't', registered_at => '2025-01-01 08:00Z', device_id => E'd\\u001B[1m', user_id => 'ann');
            SELECT tokenkeeper.unregister('\(Self.token)', 't', at => '2025-01-02 08:00Z');
            """)
        return database
    }

    @Test func `explain lists the tokens that an expression of tags matches, and shows what was changed`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aaaaaaaa01', 't', tags => '{news,old}', registered_at => '2025-01-01 08:00Z');
            SELECT tokenkeeper.register('aaaaaaaa02', 't', tags => '{news,muted}');
            SELECT tokenkeeper.register('aaaaaaaa03', 't');
            SELECT tokenkeeper.unregister('aaaaaaaa01', 't');
            SELECT tokenkeeper.tag('t', token => 'aaaaaaaa01', add => '{lang:cs}', remove => '{old}');
            """)
        let url = database.url(user: "a_reader")
        #expect(
            try explain(["--topic", "t", "--tag", "news && !muted"], on: url).output
                == "aaaaaaaa… unregistered_by_app news, lang:cs\n")
        let json = try explain(["--topic", "t", "--tag", "!news", "--json"], on: url).output
        #expect(json.contains("\"token\":\"aaaaaaaa03\"") && json.hasPrefix("[") && !json.contains("aaaaaaaa01"))
        #expect(
            try explain(["--topic", "t", "--tag", "x"], on: url).output == "no registered token of the topic matches\n")
        let invalid = try explain(["--topic", "t", "--tag", "news &"], on: url)
        #expect(
            invalid.status != 0 && invalid.errors.contains("'&' at position 6, expected &&, || or the end"),
            "\(invalid.errors)")
        #expect(try explain(["--tag", "news"], on: url).errors.contains("--tag needs --topic."))
        let told = try explain(["aaaaaaaa01"], on: url).output
        #expect(told.contains("\n  tags: news, lang:cs\n"))
        #expect(told.contains("  its tags were changed: added lang:cs; removed old\n"))
    }

    @Test func `explain prints the history in UTC, without control characters`() throws {
        let database = try deadToken()
        let told = try explain(
            ["AABBCCDD"], on: database.url(user: "a_reader"),
            environment: ["PGTZ": "America/New_York", "PGDATESTYLE": "SQL, DMY"])
        #expect(told.status == 0, "\(told.errors)")
        let lines = told.output.split(separator: "\n").map(String.init)
        #expect(lines.first == "t (production) \(Self.token)")
        #expect(
            lines.contains(
                "  now: must not be sent to: the app unregistered it as of 2025-01-02 08:00:00 UTC, which is not earlier than the last registration, 2025-01-01 08:00:00 UTC."
            ), "\(told.output)")
        #expect(lines.contains("  what would revive it: a registration later than 2025-01-02 08:00:00.000000 UTC."))
        #expect(
            lines.contains {
                $0.hasPrefix("    20")
                    && $0.hasSuffix(
                        "UTC  registered for the first time, as of 2025-01-01 08:00:00 UTC, device d\u{FFFD}[1m, user ann"
                    )
            })
        #expect(lines.last == "  (repeated results and registrations that change nothing leave no event)")
        #expect(!told.output.contains("\u{1B}"))
        let byDevice = try explain(["--device", "d\u{1B}[1m"], on: database.url(user: "a_operator"))
        #expect(byDevice.output == told.output)
        #expect(lines.contains("  user: ann"))
        let byUser = try explain(["--user", "ann"], on: database.url(user: "a_reader"))
        #expect(byUser.output == told.output)
    }

    @Test func `explain prints JSON for programs`() throws {
        let database = try deadToken()
        let told = try explain([Self.token, "--topic", "t", "--json"], on: database.url(user: "a_reader"))
        #expect(told.status == 0 && told.output.split(separator: "\n").count == 1, "\(told.errors)")
        let array = try JSONSerialization.jsonObject(with: Data(told.output.utf8)) as? [[String: Any]]
        #expect(array?.first?["state"] as? String == "unregistered_by_app")
        let nothing = try explain(
            [Self.token, "--environment", "sandbox", "--json"], on: database.url(user: "a_reader"))
        #expect(nothing.status == 0 && nothing.output == "[]\n")
    }

    @Test func `explain says that an unknown token may be sent to`() throws {
        let database = try TestCluster.shared.database()
        let told = try explain([Self.token, "--set", "sweep.event_retention=60d"], on: database.url(user: "a_reader"))
        #expect(
            told.status == 0
                && told.output
                    == "the token is not known: it may be sent to\nhistory is kept for sweep.event_retention (60d)\n"
        )
        let mistyped = try explain([Self.token, "--topic", "tt"], on: database.url(user: "a_reader"))
        #expect(mistyped.status == 0 && mistyped.errors.contains("warning: topic tt is not known"), "\(mistyped)")
    }

    @Test func `explain lists the tokens that first digits match, and asks for more digits`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "SELECT count(tokenkeeper.register('aabbccdd' || lpad(to_hex(i), 56, '0'), 't')) FROM generate_series(1, 11) AS i"
        )
        let told = try explain(["aabbccdd"], on: database.url(user: "a_reader"))
        #expect(told.status == 64 && told.errors.contains("give more digits or --topic"), "\(told.errors)")
        #expect(told.output == String(repeating: "production t aabbccdd… active\n", count: 11))
    }

    @Test(arguments: [
        [], [token, token], [token, "--device", "d"], [token, "--user", "u"],
        ["--device", "d", "--user", "u"], ["--user", ""], ["aabbccd"], [token + "z"], ["--device", ""],
        [token, "--environment", "staging"], [token, "--topic", ""],
    ])
    func `explain refuses an invalid command line without showing a token`(arguments: [String]) throws {
        let refused = try explain(arguments, on: "postgresql://127.0.0.1:1/db")
        #expect(refused.status == 64 && refused.errors.contains("xpected"), "\(refused.errors)")
        #expect(!(refused.output + refused.errors).contains(Self.token.prefix(9)))
    }

    @Test func `explain needs a reader's rights and a migrated database`() throws {
        let database = try TestCluster.shared.database()
        let refused = try explain([Self.token], on: database.url(user: "a_app"))
        #expect(refused.status == 69 && refused.errors.contains("this role lacks rights"), "\(refused.errors)")
        let empty = try TestCluster.shared.database(migrated: false)
        #expect(try explain([Self.token], on: empty.url(user: "owner")).status == 78)
    }

    @Test func `explain works on a standby`() throws {
        // A copy of the shared cluster would have the databases of all tests in it.
        let cluster = try TestCluster.prepared()
        let database = try deadToken(on: cluster)
        let standby = try TestCluster(standbyOf: cluster)
        let told = try explain(["aabbccdd"], on: standby.url(database: database.name, user: "a_reader"))
        #expect(told.status == 0 && told.output.contains("must not be sent to"), "\(told.errors)")
    }
}
