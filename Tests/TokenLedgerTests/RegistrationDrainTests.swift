import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `The drain of registrations` {
    let database: TestDatabase

    init() throws { database = try TestCluster.shared.database() }

    private static let death = #"'{"reason":"Unregistered","timestamp":1794000000123}'"#

    private func makeDrain(role: Drain.Role = .primary, rejectedPerHour: Int64 = 10_000) -> Drain {
        Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, rejectedPerHour: rejectedPerHour, role: role,
            interpret: Interpretation.verdict(on:))
    }

    private func queue(_ rows: String, partition: String? = nil) throws {
        let (column, value) = partition.map { (", partition_number", ", \($0)") } ?? ("", "")
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, registered_at, device_id, unregistered\(column))
            SELECT 't', v.token, v.at::timestamptz, v.device, v.unregistered::boolean\(value)
            FROM (VALUES \(rows)) AS v (token, at, device, unregistered)
            """, user: partition == nil ? "a_app" : "owner")
    }

    /// The tokens and their states.
    private func tokens(_ columns: String = "token, state") throws -> String {
        try database.psql("SELECT \(columns) FROM tokenkeeper.token ORDER BY token")
    }

    private func queued() throws -> String { try database.psql("SELECT count(*) FROM tokenkeeper.registration") }

    @Test func `registrations and logouts are applied as register and unregister would`() throws {
        try queue(
            """
            ('aa', '2026-01-01Z'::timestamptz, NULL, NULL), ('bb', '2026-01-01Z', NULL, false), ('bb', '2026-01-02Z', NULL, true),
            ('cc', '2026-01-02Z', 'd', NULL), ('dd', '2026-01-03Z', 'd', NULL)
            """)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.registrations == .init(applied: 5))
        #expect(pass.taken == 5 && pass.recorded == 0 && pass.settledResults == 0 && pass.settled == 5)
        #expect(try tokens() == "aa|active\nbb|unregistered_by_app\ncc|superseded\ndd|active")
        #expect(try queued() == "0")
    }

    @Test func `the order in which rows are queued and taken does not matter`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let rows = (0..<300).map { _ in
            let token = ["aa", "bb", "cc", "dd", "ee", "ff"].randomElement(using: &chance)!
            let isLogout = Int.random(in: 0..<4, using: &chance) == 0
            let day = Int.random(in: 1...28, using: &chance)
            let device = isLogout ? "NULL" : ["NULL", "'d1'", "'d2'"].randomElement(using: &chance)!
            return "('\(token)', timestamptz '2026-01-\(day) Z', \(device), \(isLogout))"
        }
        var daemon = try database.connect(user: "a_daemon")
        var outcomes: Set<String> = []
        for _ in 1...4 {
            try database.psql("TRUNCATE tokenkeeper.ledger")
            for row in rows.shuffled(using: &chance).chunks(of: Int.random(in: 1...300, using: &chance)) {
                try queue(row.joined(separator: ", "))
                if Bool.random(using: &chance) { try drainAll(&daemon) }
            }
            try drainAll(&daemon)
            #expect(try queued() == "0")
            outcomes.insert(
                try database.psql(
                    """
                    SELECT encode(token_key, 'hex'), registered_at, unregistered_by_app_at, superseded_at, device_id, device_at, suppressed
                    FROM tokenkeeper.ledger ORDER BY token_key
                    """))
        }
        #expect(outcomes.count == 1)
    }

    @Test
    func `a row that cannot be understood is kept with the error, and counts again once an operator has fixed it`()
        throws
    {
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered)
            VALUES (NULL, 't', 'no hex', '2026-01-01Z', 'd', 'u', '{x,y}', false)
            """, user: "a_app")
        try queue("('aa', NULL::timestamptz, NULL, NULL)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).registrations == .init(applied: 1, rejected: 1))
        let kept =
            "SELECT environment, topic, token, device_id, user_id, tags, unregistered, attempts FROM tokenkeeper.rejected_registration"
        #expect(try database.psql(kept) == "|t|no hex|d|u|{x,y}|f|")
        let rejected = RejectedRows(.registrations)
        var someone = try database.connect(user: "a_operator")
        let groups = try rejected.groups(on: &someone)
        #expect(groups.count == 1 && groups[0].rows == 1 && groups[0].error.contains("token"))

        #expect(try rejected.requeue(.all, on: &someone) == 1)
        #expect(try drainAll(&daemon).registrations == .init(rejected: 1), "not fixed")
        #expect(try database.psql(kept) == "|t|no hex|d|u|{x,y}|f|1")
        let first = try database.psql("SELECT queued_at FROM tokenkeeper.rejected_registration")
        try database.psql("UPDATE tokenkeeper.rejected_registration SET token = 'bb'", user: "a_operator")
        let ids = try database.psql("SELECT rejected_id FROM tokenkeeper.rejected_registration")
        #expect(try rejected.requeue(.ids([-1]), on: &someone) == 0)
        #expect(try rejected.requeue(.ids([Int64(ids)!]), on: &someone) == 1)
        #expect(try database.psql("SELECT queued_at FROM tokenkeeper.registration") == first)
        #expect(try drainAll(&daemon).registrations == .init(applied: 1))
        #expect(try tokens() == "aa|active\nbb|active")
        #expect(
            try database.psql("SELECT DISTINCT operation, rows, done_by FROM tokenkeeper.operation")
                == "rejected_registrations_requeued|1|a_operator")
    }

    @Test
    func
        `any text is queued and rejected later, and only a value that is not of its column's type fails the statement`()
        throws
    {
        let odd = "chr(9) || ' no token <>{}' || chr(10) || repeat('x', 600)"
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (environment, topic, token, device_id, user_id) VALUES (\(odd), \(odd), \(odd), \(odd), \(odd));
            INSERT INTO tokenkeeper.registration (token) VALUES (NULL)
            """, user: "a_app")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id)
            VALUES (\(odd), \(odd), \(odd), \(odd), \(odd), \(odd));
            INSERT INTO tokenkeeper.send_result (token) VALUES (NULL)
            """, user: "a_sender")
        for (queue, column, value) in [
            ("registration", "registered_at", "'never'"), ("registration", "registered_at", "'2026-13-45'"),
            ("registration", "tags", "'x'"), ("registration", "unregistered", "'perhaps'"),
            ("registration", "source_id", "'a'"), ("send_result", "sent_at", "'never'"),
        ] {
            #expect(throws: (any Error).self, "\(column)") {
                try database.psql(
                    "INSERT INTO tokenkeeper.\(queue) (topic, token, \(column)) VALUES ('t', 'aa', \(value))",
                    user: queue == "registration" ? "a_app" : "a_sender")
            }
        }
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.registrations == .init(rejected: 2) && pass.rejected == 2)
        #expect(try queued() == "0" && tokens() == "")
    }

    @Test func `rejected rows are discarded by error, and those of results are others`() throws {
        try queue("('zz', now(), NULL, NULL), ('yy', now(), NULL, NULL)")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'zz', 410)", user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        var someone = try database.connect(user: "a_operator")
        #expect(try RejectedRows(.registrations).discard(.error("no such error"), on: &someone) == 0)
        #expect(try RejectedRows(.registrations).discard(.all, on: &someone) == 2)
        #expect(try RejectedRows(.results).groups(on: &someone).count == 1)
        #expect(try RejectedRows(.registrations).groups(on: &someone).isEmpty)
    }

    @Test func `beyond the allowance, rejected rows are only counted, except those that were requeued`() throws {
        try queue((1...30).map { "('zz\($0)', now(), NULL, NULL)" }.joined(separator: ", "))
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon, drain: makeDrain(rejectedPerHour: 12))
        #expect(pass.registrations == .init(rejected: 30, notKept: 18))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "12")
        #expect(try database.psql("SELECT sum(registrations) FROM tokenkeeper.dropped_registration") == "18")
        #expect(try database.psql("SELECT tokenkeeper.requeue_rejected_registrations()", user: "a_operator") == "12")
        #expect(try drainAll(&daemon, drain: makeDrain(rejectedPerHour: 0)).registrations == .init(rejected: 12))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "12")
    }

    @Test func `the allowance holds for all batches, also before the rejected rows are counted again`() throws {
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain(rejectedPerHour: 12)
        var sum = Drain.Pass()
        for batch in 1...3 {
            try queue((1...10).map { "('zz\(batch)_\($0)', now(), NULL, NULL)" }.joined(separator: ", "))
            sum.add(try drain.onePass(on: &daemon))
        }
        #expect(sum.registrations == .init(rejected: 30, notKept: 18))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "12")
    }

    @Test func `a token that an application has locked waits, and does not delay the rest`() throws {
        try database.psql("SELECT tokenkeeper.register('bb', 't', registered_at => '2025-01-01Z')")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger FOR UPDATE")
        try queue("('aa', now(), NULL, NULL), ('bb', now(), NULL, true), ('cc', now(), NULL, NULL)")
        let first = try database.psql("SELECT queued_at FROM tokenkeeper.registration WHERE token = 'bb'")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.registrations.applied == 2 && pass.registrations.putBack == 1 && pass.lockWaits > 0)
        #expect(try tokens() == "aa|active\nbb|active\ncc|active")
        #expect(try database.psql("SELECT token, queued_at FROM tokenkeeper.registration_retry") == "bb|\(first)")
        try app.execute("COMMIT")
        #expect(try drainAll(&daemon).registrations == .init(applied: 1))
        #expect(try tokens() == "aa|active\nbb|unregistered_by_app\ncc|active")
    }

    @Test func `a row that the database refuses waits, and the rest of its batch is applied`() throws {
        // A trigger stands for any unforeseen cause.
        try database.psql(
            """
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'no bb' USING ERRCODE = 'P0001'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON tokenkeeper.ledger FOR EACH ROW WHEN (NEW.token_key = '\\xbb')
            EXECUTE FUNCTION public.refuse()
            """)
        try queue("('aa', now(), NULL, NULL), ('bb', now(), NULL, NULL), ('cc', now(), NULL, NULL)")
        var daemon = try database.connect(user: "a_daemon")
        var incidents: [String] = []
        var drain = makeDrain()
        var sum = Drain.Pass()
        for _ in 1...2 {
            sum.add(
                try drain.pass(
                    on: &daemon,
                    report: {
                        switch $0 {
                        case .batchSetAside(let queue, _): incidents.append("batch of \(queue)")
                        case .rowRefused(let queue, _): incidents.append("row of \(queue)")
                        default: break
                        }
                    }, betweenBatches: { _, _, _ in true }))
        }
        #expect(sum.registrations == .init(applied: 2, putBack: 3))
        #expect(incidents == ["batch of registrations", "row of registrations"])
        #expect(sum.refusals[.registrations]?.rows == 1 && sum.trouble == nil)
        #expect(try tokens("token") == "aa\ncc")
        #expect(try database.psql("SELECT token FROM tokenkeeper.registration") == "bb")
    }

    /// A trigger stands for what the database refuses for some rows: by default, what only a person can fix.
    private func refuse(_ tokens: String, sqlState: String = "42501") throws {
        try database.psql(
            """
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'not allowed' USING ERRCODE = '\(sqlState)'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON tokenkeeper.ledger FOR EACH ROW WHEN (\(tokens)) EXECUTE FUNCTION public.refuse()
            """)
    }

    @Test func `rows of a batch that fails wait whole until a person has fixed the cause`() throws {
        try refuse("true")
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, attempts, released)
            VALUES ('t', 'aa', '2026-01-01Z', 'd', 'u', '{g}', false, 7, 2, true), ('t', 'bb', '2026-01-01Z', NULL, NULL, NULL, true, NULL, NULL, NULL)
            """)
        let whole =
            "SELECT topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, attempts, released, queued_at FROM"
        let rows = try database.psql("\(whole) tokenkeeper.registration ORDER BY token")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        #expect(try drain.onePass(on: &daemon).registrations == .init(putBack: 2))
        let retry = try drain.onePass(on: &daemon)
        #expect(retry.registrations.taken == 0 && retry.troubles[.registrations]?.sqlState == "42501")
        #expect(try database.psql("\(whole) tokenkeeper.registration_retry ORDER BY token") == rows)
        try database.psql("DROP TRIGGER refuse ON tokenkeeper.ledger")
        try drainAll(&daemon)
        #expect(try tokens("token, state, device_id, tags") == "aa|active|d|{g}\nbb|unregistered_by_app||")
        #expect(try queued() == "0")
    }

    @Test func `what the database refuses is kept, whatever the allowance`() throws {
        try refuse("true", sqlState: "P0001")
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, attempts)
            SELECT 't', lpad(to_hex(i), 4, '0'), CASE WHEN i = 10 THEN 1 END FROM generate_series(1, 20) AS i
            """)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon, drain: makeDrain(rejectedPerHour: 1))
        #expect(pass.registrations.settled == 0 && pass.troubles[.registrations]?.sqlState == "P0001")
        #expect(try queued() == "20")
    }

    @Test func `many rows that only a person can fix do not stop the others`() throws {
        try refuse("NEW.token_key < '\\xbb'")
        try queue(
            (0..<35).map { "('\($0 < 30 ? "aa" : "cc")\(String($0 + 16, radix: 16))', now(), NULL, NULL)" }
                .joined(separator: ", "))
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        try eventually("the others are applied") {
            _ = try drain.onePass(on: &daemon)
            return try tokens("token").split(separator: "\n").count == 5
        }
        #expect(try database.psql("SELECT count(*), count(DISTINCT token) FROM tokenkeeper.registration") == "30|30")
        // What comes later is applied, too.
        try queue("('dd', now(), NULL, NULL)")
        try drainAll(&daemon, drain: drain)
        #expect(try tokens("token").hasSuffix("dd"))
    }

    @Test
    func `a row that violates a constraint of somebody waits, and the rest of its batch is applied`()
        throws
    {
        try database.psql("ALTER TABLE tokenkeeper.ledger ADD CONSTRAINT no_bb CHECK (token_key <> '\\xbb')")
        try queue("('aa', now(), NULL, NULL), ('bb', now(), NULL, NULL), ('cc', now(), NULL, NULL)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).registrations == .init(applied: 2, putBack: 3))
        #expect(try tokens("token") == "aa\ncc")
        #expect(try database.psql("SELECT token FROM tokenkeeper.registration") == "bb")
    }

    @Test func `large rows are applied one by one, and a longer one than 16 MiB is rejected unread, and cut`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, user_id) VALUES
                ('t', 'aa', NULL), ('t', 'bb', repeat('u', 9000)), ('t', 'cc', repeat('u', 16777216))
            """, user: "a_app")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.registrations.putBack == 2)
        try drainAll(&daemon, drain: drain)
        #expect(try queued() == "0")
        #expect(
            try database.psql(
                "SELECT token, error FROM tokenkeeper.rejected_registration WHERE length(user_id) = 1024")
                == "cc|the row is too long: 16777229 bytes, expected at most 16777216: environment 10, topic 1, token 2, user_id 16777216"
        )
    }

    @Test func `a row committed late, behind the cursor, is found`() throws {
        var early = try database.connect(user: "a_app")
        try early.execute("BEGIN; INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'aa')")
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token) SELECT 't', lpad(to_hex(i), 8, '0') FROM generate_series(1, 10000) AS i",
            user: "a_app")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        var applied = 0
        while applied < 10_000 { applied += try drain.onePass(on: &daemon).registrations.applied }
        try early.execute("COMMIT")
        try eventually("the late row is applied") { try drain.onePass(on: &daemon).registrations.applied == 1 }
    }

    @Test func `a sealed partition is drained in batches, and truncated when it is empty`() throws {
        let sealed = try database.psql("SELECT (\(Partition.currentInSQL) + 4) % 8")
        let table = "tokenkeeper.registration_\(sealed)"
        try database.psql("ALTER TABLE \(table) SET (autovacuum_enabled = off)")
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, partition_number)
            SELECT 't', lpad(to_hex(i), 64, '0'), \(sealed) FROM generate_series(1, 5000) AS i
            """)
        let file = try database.psql("SELECT pg_relation_filenode('\(table)')")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.registrations == .init(applied: 5000) && pass.bulkReads == 0)
        #expect(try database.psql("SELECT pg_relation_filenode('\(table)')") != file)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "5000")
    }

    @Test func `while an operator locks out the drains, no batch begins`() throws {
        try database.psql("SELECT tokenkeeper.register('bb', 't')")
        var app = try database.connect(user: "a_operator")
        try app.execute("BEGIN; SELECT tokenkeeper.release_held('t')")
        try queue("('aa', now(), NULL, NULL)")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.taken == 0 && pass.lockWaits == 1)
        #expect(try queued() == "1")
        try app.execute("COMMIT")
        #expect(try drainAll(&daemon).registrations.applied == 1)
    }

    @Test func `a helper drains them too`() throws {
        try queue("('aa', now(), NULL, NULL)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon, drain: makeDrain(role: .helper)).registrations.applied == 1)
    }

    @Test func `several daemons share the work, and each broken row is kept once`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token)
            SELECT 't', CASE WHEN i % 10 = 0 THEN 'broken ' || i ELSE lpad(to_hex(i), 8, '0') END FROM generate_series(1, 20000) AS i
            """, user: "a_app")
        let database = database
        let failures = Failures()
        atOnce(3) { worker in
            do {
                var daemon = try database.connect(user: "a_daemon")
                var drain = Drain(
                    lockTimeout: .milliseconds(50), guardLimits: .off, role: worker == 0 ? .primary : .helper,
                    interpret: Interpretation.verdict(on:))
                while try database.psql("SELECT count(*) FROM tokenkeeper.registration") != "0" {
                    _ = try drain.onePass(on: &daemon)
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [])
        #expect(
            try database.psql(
                "SELECT count(*), count(DISTINCT token) FROM tokenkeeper.rejected_registration") == "2000|2000")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "18000")
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'registered'") == "18000")
    }

    @Test func `what is wrong with one queue does not stop the other`() throws {
        try database.psql(
            "REVOKE DELETE ON tokenkeeper.registration_0, tokenkeeper.registration_1, tokenkeeper.registration_2, tokenkeeper.registration_3, tokenkeeper.registration_4, tokenkeeper.registration_5, tokenkeeper.registration_6, tokenkeeper.registration_7 FROM tokenkeeper_daemon"
        )
        try queue("('aa', now(), NULL, NULL)")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'bb', 410, \(Self.death))",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 1 && pass.registrations.taken == 0)
        #expect(pass.troubles[.registrations]?.sqlState == "42501" && pass.troubles[.results] == nil)
        #expect(pass.trouble?.sqlState == "42501")
    }
}

extension Array {
    fileprivate func chunks(of size: Int) -> [ArraySlice<Element>] {
        stride(from: 0, to: count, by: size).map { self[$0..<Swift.min($0 + size, count)] }
    }
}
