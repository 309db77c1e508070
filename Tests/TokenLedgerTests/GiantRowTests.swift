import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// Rows of hundreds of megabytes. A login that may insert into a queue can make one from a few megabytes, because PostgreSQL compresses it.
@Suite(.ownThread, .serialized) struct `Giant rows` {
    let database: TestDatabase
    let token = String(repeating: "ab", count: 32)

    init() throws { database = try TestCluster.shared.database() }

    /// Inserts rows that refer to a text `x` of so many bytes, which is stored compressed.
    private func insert(_ statement: String, bytes: Int = 100_000_000, user: String) throws {
        var session = try database.connect(user: user)
        try session.execute("CREATE TEMPORARY TABLE giant AS SELECT repeat('x', \(bytes)) AS x")
        try session.execute(statement)
    }

    /// Together they are longer than an integer says.
    @Test func `a result of six texts of 360 MB stops nothing, and is rejected, cut, with its sizes`() throws {
        try insert(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id) SELECT x, x, x, x, x, x FROM giant;
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', '\(token)', '410'), ('t', 'cc', '410')
            """, bytes: 360_000_000, user: "a_sender")
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')") == "0")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.rejected == 1 && pass.recorded == 2)
        #expect(try database.psql("SELECT token FROM tokenkeeper.token") == "cc")
        let columns = ["environment", "topic", "token", "status", "body", "apns_id"]
        #expect(
            try database.psql(
                "SELECT error, \(columns.map { "length(\($0))" }.joined(separator: ", ")) FROM tokenkeeper.rejected_result"
            )
                == "the row is too long: 2160000000 bytes, expected at most 16777216: "
                + columns.map { "\($0) 360000000" }.joined(separator: ", ") + "|1024|1024|1024|1024|1024|1024")
        #expect(
            try database.psql(
                "SELECT environment, topic, status, results FROM tokenkeeper.result_stat WHERE reason = '(rejected)'")
                == "|||1")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(try database.psql("SELECT tokenkeeper.forget('cc')") != "0")
    }

    @Test(arguments: [(3000, 0), (100_000_000, 3)])
    func `200s with long texts count under the beginning of their topic, and giant ones are rejected`(
        bytes: Int, rejected: Int
    ) throws {
        try insert(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status) SELECT x, x, x, '200' FROM giant, generate_series(1, 3);
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', '\(token)', '200')
            """, bytes: bytes, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.rejected == rejected && pass.accepted + pass.recorded == 4 - rejected)
        #expect(
            try database.psql(
                "SELECT length(environment), length(topic), status, results FROM tokenkeeper.result_stat WHERE reason IS NULL ORDER BY 2"
            )
                == "10|1|200|1" + (rejected == 0 ? "\n20|512|200|3" : ""))
    }

    @Test func `a registration with giant texts and tags stops nothing, and is rejected, cut`() throws {
        try insert(
            """
            INSERT INTO tokenkeeper.registration (topic, token, device_id, user_id) SELECT 't', x, x, x FROM giant;
            INSERT INTO tokenkeeper.registration (topic, token, tags) SELECT 't', 'aa', ARRAY[x] FROM giant;
            INSERT INTO tokenkeeper.registration (topic, token, tags) SELECT 't', 'bbbb', ARRAY[left(x, 70000000), 'y'] FROM giant;
            INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', '\(token)'), ('t', 'cc')
            """, user: "a_app")
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')") == "0")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).registrations == .init(applied: 2, rejected: 3, putBack: 3))
        #expect(try database.psql("SELECT token FROM tokenkeeper.token") == "cc")
        #expect(
            try database.psql(
                """
                SELECT length(token), length(device_id), length(user_id), length(array_to_string(tags, ' ')), regexp_replace(error, '11[0-9]{5}\\M', '*', 'g')
                FROM tokenkeeper.rejected_registration ORDER BY 1
                """
            ) == """
                2||||the row is too long: * bytes, expected at most 16777216: environment 10, topic 1, token 2, tags *, as it is stored, expected at most 1048576
                4|||1024|the row is too long: 70000016 bytes, expected at most 16777216: environment 10, topic 1, token 4, tags 70000001
                1024|1024|1024||the row is too long: 300000011 bytes, expected at most 16777216: environment 10, topic 1, token 100000000, device_id 100000000, user_id 100000000
                """)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
        #expect(try database.psql("SELECT tokenkeeper.forget('cc')") != "0")
    }

    @Test func `tags with a million nulls, which are bits as stored, are too long and are not read one by one`() throws
    {
        let database = try TestCluster.shared.database()
        let nulls = "array_fill(NULL::text, ARRAY[1000000])"
        #expect(try database.psql("SELECT pg_column_size(\(nulls)) < tokenkeeper.most_stored()") == "t")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.registration_size_fault('production', 't', 'aa', NULL, NULL, NULL, \(nulls)) LIKE 'the row is too long: %tags 1024000000'"
            ) == "t")
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, tags) VALUES ('t', repeat('ef', 32), \(nulls))",
            user: "a_app")
        #expect(try database.psql("SELECT tokenkeeper.forget('bb')", user: "a_app") == "0")
    }

    @Test func `a request with giant texts or a giant payload stops nothing, and fails, cut`() throws {
        try insert(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, push_type, collapse_id)
            SELECT 'com.example.app', x, '{}', x, x FROM giant;
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.app', 'aa', ('"' || x || '"')::json FROM giant;
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.app', 'bbbb', ('"' || left(x, 70000000) || '"')::json FROM giant;
            INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.app', '\(token)', '{}'), ('com.example.app', 'cc', '{}')
            """, user: "a_sender")
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')") == "0")
        var daemon = try database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "host/1/1", processScope: "here", lockTimeout: .milliseconds(500))
        let claim = try outbox.claim(
            TopicScope(environment: "production", topic: "com.example.app"), most: 100, backgroundPerHour: 3,
            on: &daemon)
        #expect(claim.failed == 3 && claim.requests.count == 1)
        #expect(
            try database.psql(
                """
                SELECT length(token), length(push_type), length(collapse_id), length(payload #>> '{}'), regexp_replace(error, '11[0-9]{5}\\M', '*', 'g')
                FROM tokenkeeper.failed_send ORDER BY 1
                """
            ) == """
                2||||the row is too long: * bytes, expected at most 16777216: environment 10, topic 15, token 2, payload *, as it is stored, expected at most 1048576
                4|||1024|the row is too long: 70000031 bytes, expected at most 16777216: environment 10, topic 15, token 4, payload 70000002
                1024|1024|1024|2|the row is too long: 300000027 bytes, expected at most 16777216: environment 10, topic 15, token 100000000, push_type 100000000, collapse_id 100000000, payload 2
                """)
        #expect(try database.psql("SELECT tokenkeeper.forget('cc')") != "0")
    }

    @Test func `enqueue and audience_size refuse arguments of more than 16 MiB`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        for call in [
            "enqueue('{}', 't', tokens => ARRAY[repeat('ab', 8400000)])",
            "enqueue('{}', 't', tokens => array_fill(repeat('ab', 32), ARRAY[300000]))",
            "enqueue('{}', 't', everyone => true, name => repeat('x', 17000000))",
            "audience_size('t', tokens => array_fill(repeat('ab', 32), ARRAY[300000]))",
        ] {
            var sender = try database.connect(user: "a_sender")
            do {
                try sender.execute("SELECT tokenkeeper.\(call)")
                Issue.record("\(call) is accepted")
            } catch let error as DatabaseError {
                #expect(
                    error.sqlState == "22023" && error.message.contains("bytes, expected at most 16777216"),
                    "\(call): \(error)")
            }
        }
    }

    /// A topic that is a giant would be read, sorted and copied with the rest of its partition.
    @Test func `a bulk read moves giants to the backlog unread`() throws {
        try insert(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT x, x, '410', 0 FROM giant",
            user: "owner")
        var daemon = try database.connect(user: "a_daemon")
        let sealed = SealedPartition(
            partition: Partition(.results, 0), transaction: BatchTransaction(lockTimeout: .milliseconds(50)))
        #expect(try sealed.take(on: &daemon)?.moved == 1)
        #expect(try drainAll(&daemon).rejected == 1)
    }
}
