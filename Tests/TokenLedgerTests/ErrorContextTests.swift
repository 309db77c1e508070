import LedgerTestSupport
import TestThreads
import Testing

/// psql and drivers print the CONTEXT of an error. Each function of ours between the caller and the error is a line of it, or three.
@Suite(.ownThread) struct `Errors for callers` {
    @Test(arguments: [
        "register('zz', 'com.example.app')", "register('aa', 'com example')",
        "register('aa', 'com.example.app', 'prod')",
        "unregister('zz', 'com.example.app')", "tag('com.example.app', token => 'zz', add => '{x}')", "forget('zz')",
        "enqueue('{}', 'com.example.typo', everyone => true)", "enqueue('{}', 'com.example.app', tags => 'a &&')",
        "enqueue('{}', 'com.example.app', tokens => '{zz}')", "enqueue('{}', 'com.example.app')",
        "enqueue('[]', 'com.example.app', everyone => true)", "enqueue('{}', repeat('x', 20000000), everyone => true)",
        "enqueue('{}', 'com.example.app', everyone => true, expiration => '2020-01-01Z')",
        "audience_size('com.example.typo', everyone => true)", "audience_size('com.example.app', tags => 'a &&')",
        "cancel_campaign(99)", "set_campaign_rate(99, 5)", "pause_sending('com.example.typo')",
        "reinstate('com.example.typo', 'production', '2025-01-01Z', '2025-01-02Z')",
        "attach('nowhere', '''x''', 'token')",
    ])
    func `have at most two lines of CONTEXT`(call: String) throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')")
        expect("SELECT tokenkeeper.\(call)", try output(database, "SELECT tokenkeeper.\(call)"))
    }

    @Test(arguments: ["enqueue('{}', 'com.example.app', everyone => true)", "forget('aa')", "cancel_campaign(1)"])
    func `of the isolation level, too`(call: String) throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 'com.example.app')")
        let statement = "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT tokenkeeper.\(call)"
        let said = try output(database, statement)
        #expect(said.contains { $0.contains("the isolation level is serializable") })
        expect(statement, said)
    }

    private func output(_ database: TestDatabase, _ statement: String) throws -> [String] {
        try TestCluster.run(
            ["sh", "-c", "psql -XAtq -d \"$1\" -c \"$2\" 2>&1 || true", "sh", database.url(user: "owner"), statement],
            input: ""
        ).split(separator: "\n").map(String.init)
    }

    private func expect(_ statement: String, _ said: [String]) {
        #expect(said.contains { $0.hasPrefix("ERROR") }, "\(statement): \(said)")
        let context = said.drop { !$0.hasPrefix("CONTEXT") }
        #expect((1...2).contains(context.count), "\(statement): \(context)")
    }
}
