import Foundation
import LedgerTestSupport

/// What grows with the ledger, and how: the same calls and the same work at each size of one ledger.
///
/// It needs up to 45 GB of disk and an hour, so a full run of the benchmark does not include it.
struct GrowthMeasurement {
    let scale: Scale
    let report: Report
    /// Called after each step, so that an early end does not lose the earlier ones.
    let onEach: (_ steps: [GrowthStep], _ cluster: PrivateCluster) throws -> Void

    /// Without WAL for the indexes that are built, and without more WAL than the disk has room for.
    static let settings = [
        "wal_level=minimal", "max_wal_size=4GB", "min_wal_size=1GB", "shared_preload_libraries=pg_stat_statements",
    ]

    func run() throws {
        let cluster = try PrivateCluster(more: Self.settings)
        let database = try cluster.copy(of: "bare")
        try database.session().run("CREATE EXTENSION pg_stat_statements")
        var ledger = try GrowingLedger(database)
        var steps: [GrowthStep] = []
        for size in scale.growth {
            try ledger.grow(to: size)
            steps.append(try measure(ledger))
            try onEach(steps, cluster)
        }
        compare(steps)
        try registered(cluster, steps)
        try onEach(steps, cluster)
    }

    /// Whether a ledger that was registered token by token has the same size.
    private func registered(_ cluster: PrivateCluster, _ steps: [GrowthStep]) throws {
        let database = try cluster.copy(of: "bare")
        defer { try? database.drop() }
        let ledger = try GrowingLedger(database)
        try ledger.register(scale.calls * 5)
        let bytes = try ledger.sizes().reduce(0) { $0 + $1.bytes } / Double(scale.calls * 5)
        report.compare(
            "bytes a token of \(Scale.short(scale.calls * 5)) that were registered one by one, over the same of \(Scale.short(steps[0].tokens))",
            Spread([bytes / steps[0].bytes]))
    }

    private func measure(_ ledger: GrowingLedger) throws -> GrowthStep {
        let session = try ledger.database.session()
        try session.run("SET synchronous_commit = off")
        var step = GrowthStep(tokens: ledger.tokens)
        step.rows = try session.number("SELECT count(*) FROM tokenkeeper.ledger")
        step.sizes = try ledger.sizes()
        step.bytesOfEvent = try ledger.bytesOfEvent()
        Progress.say("measuring \(Scale.short(ledger.tokens)) tokens: \(Int(step.bytes)) bytes a token")
        try gate(ledger, session, &step)
        try register(ledger, session, &step)
        try campaign(session, &step)
        try explain(ledger, session, &step)
        step.longest.append(
            ("the drain", try Self.longestStatement(session) { try drain(ledger, session, &step) }))
        step.longest.append(
            ("the sweep", try Self.longestStatement(session) { try sweep(ledger, session, &step) }))
        try vacuum(ledger, &step)
        for line in step.lines { Progress.say("  " + line) }
        return step
    }

    private func gate(_ ledger: GrowingLedger, _ session: Session, _ step: inout GrowthStep) throws {
        let number = ledger.anyToken("i")
        let single = try session.texts(
            """
            SELECT format('SELECT tokenkeeper.is_sendable(%L, %L)', \(GrowingLedger.token(number)), \(GrowingLedger.topic(number)))
            FROM generate_series(1, 320) AS i
            """)
        step.add("is_sendable", try CallCost(single, warmups: 20, on: session))
        let third = "\(ledger.anyToken("i")) / 3 * 3"
        let many = try session.texts(
            """
            SELECT format('SELECT count(*) FROM tokenkeeper.sendable(%L, %L)', array_agg(\(GrowingLedger.token(third))), '\(Workload.topics[0])')
            FROM generate_series(1, 22000) AS i GROUP BY i % 22
            """)
        step.add("sendable, 1,000 tokens", try CallCost(many, warmups: 2, on: session))
    }

    private func register(_ ledger: GrowingLedger, _ session: Session, _ step: inout GrowthStep) throws {
        func calls(_ token: String, _ device: String, like known: String) throws -> CallCost {
            try CallCost(
                try session.texts(
                    """
                    SELECT format('SELECT tokenkeeper.register(%L, %L, device_id => %L, user_id => %L, tags => %L)', \(token), \(GrowingLedger.topic(known)),
                                  \(device), 'user-' || \(known) / 2, ARRAY['city-' || \(known) % 997, 'lang-' || \(known) % 31, 'news'])
                    FROM generate_series(1, 320) AS i
                    """), warmups: 20, on: session)
        }
        let new = "encode(sha256(('new-\(ledger.tokens)-' || i)::bytea), 'hex')"
        let (known, named) = (ledger.activeToken("i"), ledger.activeToken("i", rest: 41))
        step.add(
            "register, a known token", try calls(GrowingLedger.token(known), GrowingLedger.device(known), like: known))
        step.add(
            "register, a new device",
            try calls(new, "md5('new-device-\(ledger.tokens)-' || i)::uuid::text", like: known))
        let next = "encode(sha256(('next-\(ledger.tokens)-' || i)::bytea), 'hex')"
        step.add(
            "register, a new token of a known device", try calls(next, GrowingLedger.device(named), like: named))
    }

    /// Addresses one token in a thousand, and the first part of everyone.
    private func campaign(_ session: Session, _ step: inout GrowthStep) throws {
        func address(_ audience: String, _ ahead: Int) throws -> (cost: CallCost, addressed: Double, isAll: Bool) {
            let campaign = Int(
                try session.number(
                    "SELECT tokenkeeper.enqueue('\(SendingWork.payload)', '\(Workload.topics[0])', \(audience))"))
            let cost = try CallCost(
                ["SELECT tokenkeeper.address_campaign(\(campaign), \(ahead), patiently => true)"], on: session)
            let row = "FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)"
            let addressed = try session.number("SELECT addressed \(row)")
            let isAll = try session.number("SELECT is_addressed::integer \(row)") == 1
            try session.run("SELECT tokenkeeper.cancel_campaign(\(campaign))")
            return (cost, addressed, isAll)
        }
        // The first call of the session makes plans.
        _ = try address("everyone => true, confirm => true", 1)
        let everyone = try address("everyone => true, confirm => true", 1)
        step.add("campaign to everyone, the first part", everyone.cost)
        let few = try address("tags => '\(Workload.rareTag)'", 1_000_000)
        guard few.isAll, few.addressed > 0 else {
            throw TestFailure("one call addressed \(Int(few.addressed)) tokens with the rare tag, and not all")
        }
        step.add("campaign to one in 1,000, all of it", few.cost)
        step.add(
            "campaign to one in 1,000, a token", pages: few.cost.pages / few.addressed,
            milliseconds: few.cost.milliseconds / few.addressed)
    }

    /// The whole command, with its connection.
    private func explain(_ ledger: GrowingLedger, _ session: Session, _ step: inout GrowthStep) throws {
        let tokens = try session.texts(
            "SELECT \(GrowingLedger.token(ledger.activeToken("i"))) FROM generate_series(1, 20) AS i")
        let url = ledger.database.url(user: "owner")
        let pages = try Self.pages(session) {
            var milliseconds: [Double] = []
            for token in tokens {
                let start = ContinuousClock.now
                let run = try ProgramRun(
                    [DaemonProcess.program, "explain", token], environment: ["TOKENKEEPER_DATABASE_URL": url])
                guard run.status == 0 else { throw TestFailure("explain: \(run.output)\(run.errors)") }
                milliseconds.append(start.duration(to: .now) / .milliseconds(1))
            }
            let time = Spread(milliseconds)
            return (time.median, time.greatest)
        }
        step.add(
            "explain, the whole command", pages: pages.pages / Double(tokens.count), milliseconds: pages.value.0,
            longest: pages.value.1)
    }

    /// The drain of a backlog with 2 % 410s; and the view `status` after it.
    private func drain(_ ledger: GrowingLedger, _ session: Session, _ step: inout GrowthStep) throws {
        let results = scale.grownResults
        let daemons = try MeasuredDaemon.start(on: ledger.database)
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.pause(daemons, on: session)
        let stale = ledger.activeToken("i", rest: 31)
        try session.run(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, partition_number)
            SELECT \(GrowingLedger.topic("n")), \(GrowingLedger.token("n")), CASE WHEN i % 50 = 0 THEN 410 ELSE 200 END,
                   CASE WHEN i % 50 = 0 THEN '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now()) * 1000)::bigint || '}' END,
                   now(), \(try Partition.past(session).number)
            FROM generate_series(1, \(results)) AS i,
                LATERAL (SELECT CASE WHEN i % 50 = 0 THEN \(stale) ELSE \(ledger.anyToken("i")) END AS n) AS t
            """)
        try session.run("CHECKPOINT")
        let before = try Drain.counted(session)
        let position = "SELECT pg_current_wal_insert_lsn() - '0/0'"
        let written = try session.number(position)
        let stopwatch = try Stopwatch(ledger.database.cluster, daemons)
        MeasuredDaemon.resume(daemons)
        let end = try Drain.follow(session, from: before, rows: results) { kill(daemons[0].pid, 0) == 0 }.end
        let sample = try stopwatch.sample(rows: results, end: end)
        step.drainWAL = (try session.number(position) - written) / Double(results)
        step.drainedPerSecond = sample.rate
        step.drainMicroseconds = sample.serverSeconds / Double(results) * 1_000_000
        // The count and the sweep leave dead rows in small tables. Autovacuum, which is off here, would have removed them.
        for table in try session.texts(
            """
            SELECT c.oid::regclass FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'r' AND pg_relation_size(c.oid) < 16777216
            """)
        {
            try session.run("VACUUM \(table)")
        }
        // Here, because a daemon is running: without one, the view looks at the queue itself.
        step.add(
            "status",
            try CallCost(Array(repeating: "SELECT * FROM tokenkeeper.status", count: 25), warmups: 5, on: session))
    }

    /// A sweep that prunes one in a hundred of the tokens that this step added.
    private func sweep(_ ledger: GrowingLedger, _ session: Session, _ step: inout GrowthStep) throws {
        try session.run("CHECKPOINT")
        let due = try session.number(
            "SELECT count(*) FROM tokenkeeper.suppression WHERE since < now() - interval '90 days'")
        let url = ledger.database.url()
        let start = ContinuousClock.now
        let swept = try Self.pages(session) {
            let run = try ProgramRun(
                [DaemonProcess.program, "sweep", "--force"], environment: ["TOKENKEEPER_DATABASE_URL": url])
            guard run.status == 0 else { throw TestFailure("the sweep: \(run.output)\(run.errors)") }
        }
        let milliseconds = start.duration(to: .now) / .milliseconds(1)
        let left = try session.number(
            "SELECT count(*) FROM tokenkeeper.suppression WHERE since < now() - interval '90 days'")
        guard due > 0, left == 0 else { throw TestFailure("\(Int(left)) of \(Int(due)) due tokens are left") }
        step.add("sweep, a pruned token", pages: swept.pages / due, milliseconds: milliseconds / due)
    }

    /// As autovacuum performs it, with its pauses: after the pruned tokens, and then one that reads and freezes the whole table.
    private func vacuum(_ ledger: GrowingLedger, _ step: inout GrowthStep) throws {
        let session = try ledger.database.session()
        try session.run("SET vacuum_cost_delay = '2ms'")
        for (name, options) in [
            ("of what the sweep has pruned", ""), ("to prevent wraparound", "(FREEZE, DISABLE_PAGE_SKIPPING)"),
        ] {
            let start = ContinuousClock.now
            try session.run("VACUUM \(options) tokenkeeper.ledger")
            step.vacuums.append((name, start.duration(to: .now) / .seconds(1)))
        }
    }

    /// The longest statement of the daemon meanwhile, in milliseconds.
    private static func longestStatement(_ session: Session, during work: () throws -> Void) throws -> Double {
        try session.run("SELECT pg_stat_statements_reset()")
        try work()
        let own = "FROM pg_stat_statements WHERE userid = 'a_daemon'::regrole ORDER BY max_exec_time DESC LIMIT 1"
        let statement = try session.text("SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), 100) \(own)") ?? ""
        Progress.say("  the longest statement: \(statement)")
        return try session.number("SELECT max_exec_time \(own)")
    }

    /// The pages that all sessions of the database look at, once they have ended.
    private static func pages<Value>(_ session: Session, during work: () throws -> Value) throws -> (
        pages: Double, value: Value
    ) {
        let looked = """
            SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()
            """
        // What this session has looked at so far does not count.
        try session.run("SELECT pg_stat_force_next_flush()")
        let before = try session.number(looked)
        let value = try work()
        return (try session.number(looked) - before, value)
    }

    /// The bounds, by pages: they do not depend on the load.
    private func compare(_ steps: [GrowthStep]) {
        guard let first = steps.first, let last = steps.last, steps.count > 1 else { return }
        let sizes = "\(Scale.short(last.tokens)) tokens over \(Scale.short(first.tokens))"
        for (name, most) in Self.bounds {
            guard let one = first[name], let other = last[name] else { continue }
            report.compare("\(name): pages with \(sizes)", Spread([other.pages / one.pages]), atMost: most)
        }
        report.compare("bytes a token with \(sizes)", Spread([last.bytes / first.bytes]), atMost: 1.1)
        report.compare(
            "drain: processor time of the server a result with \(sizes)",
            Spread([last.drainMicroseconds / first.drainMicroseconds]), atMost: 2)
        for (work, milliseconds) in last.longest {
            report.compare(
                "the longest statement of \(work) with \(Scale.short(last.tokens)) tokens", Spread([milliseconds]),
                atMost: 1000, digits: 0, unit: " ms")
        }
        if let status = last["status"] {
            report.compare(
                "status with \(Scale.short(last.tokens)) tokens", Spread([status.milliseconds]), atMost: 50, digits: 1,
                unit: " ms")
        }
    }

    /// How many times as many pages a call may look at when the ledger is fifty times as large. A B-tree gets one level more, or two.
    private static let bounds: [(String, Double)] = [
        ("is_sendable", 1.5), ("sendable, 1,000 tokens", 1.5), ("register, a known token", 1.5),
        ("register, a new device", 1.5),
        ("register, a new token of a known device", 1.5), ("status", 1.5), ("explain, the whole command", 1.5),
        ("campaign to everyone, the first part", 1.5), ("sweep, a pruned token", 1.5),
    ]
}
