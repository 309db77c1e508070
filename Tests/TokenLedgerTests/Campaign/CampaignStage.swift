import Foundation
import LedgerTestSupport
import TokenLedger

/// A database with tokens, and the functions of campaigns as their callers use them.
struct CampaignStage {
    let database: TestDatabase
    static let topic = "com.example.app"
    static let alert = #"{"aps":{"alert":"Hello"}}"#

    /// - Parameter tokens: How many tokens are registered. Token n has the key of n in 32 bytes, the device dn, the user u(n % 10), and the tags
    ///   World and n:n.
    init(tokens: Int = 0, on cluster: TestCluster = .shared) throws {
        database = try cluster.database()
        try database.psql("SELECT tokenkeeper.ensure_topic('production', '\(Self.topic)')")
        if tokens > 0 { try register(1...tokens) }
    }

    static func token(_ number: Int) -> String { String(format: "%064x", number) }

    func register(_ numbers: ClosedRange<Int>) throws {
        // Not by register(), which would take a second for a thousand.
        try database.psql(
            """
            INSERT INTO tokenkeeper.ledger (registered_at, topic_id, token_key, device_id, user_id, tags)
            SELECT now() - interval '1 hour', t.topic_id, tokenkeeper.token_key(lpad(to_hex(i), 64, '0')), 'd' || i, 'u' || i % 10, ARRAY['World', 'n:' || i]
            FROM tokenkeeper.topic AS t, generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS i;
            SELECT tokenkeeper.recompute_tokens()
            """)
    }

    func suppress(_ number: Int) throws {
        try database.psql(
            """
            UPDATE tokenkeeper.ledger SET stale_at = now() WHERE token_key = tokenkeeper.token_key('\(Self.token(number))');
            SELECT tokenkeeper.recompute_tokens()
            """
        )
    }

    @discardableResult
    func enqueue(_ arguments: String = "everyone => true", payload: String = alert, user: String = "a_sender") throws
        -> Int
    {
        Int(
            try database.psql(
                "SELECT tokenkeeper.enqueue('\(payload)', '\(Self.topic)', \(arguments))", user: user)) ?? -1
    }

    /// Addresses one part of the audience.
    ///
    /// - Parameter how: Further arguments.
    /// - Returns: Nil if there was nothing to do.
    @discardableResult
    func address(_ campaign: Int, ahead: Int = 1_000_000, _ how: String = "") throws -> Int? {
        Int(try database.psql("SELECT tokenkeeper.address_campaign(\(campaign), \(ahead)\(how))", user: "a_daemon"))
    }

    func addressAll(_ campaign: Int) throws {
        while try database.psql("SELECT is_addressed FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)") == "f"
        {
            try address(campaign)
        }
    }

    /// - Returns: The number of each request, and the number of its token.
    func claim(_ campaign: Int, by daemon: String = "a", most: Int = 1000, backgroundPerHour: Int = 0) throws -> [Int:
        Int]
    {
        let rows = try database.psql(
            "SELECT number, encode(token_key, 'hex') FROM tokenkeeper.claim_campaign(\(campaign), '\(daemon)', \(most), \(backgroundPerHour)) WHERE outcome = 'claimed'",
            user: "a_daemon")
        return Self.requests(rows)
    }

    static func requests(_ rows: String) -> [Int: Int] {
        var requests: [Int: Int] = [:]
        for line in rows.split(separator: "\n") {
            let parts = line.split(separator: "|")
            requests[Int(parts[0])!] = Int(parts[1], radix: 16)
        }
        return requests
    }

    /// What a daemon says about one request.
    struct Word {
        var number: Int
        var fate = "answered"
        var status: Int?
        var pause: Int?
        var outcome: String?
        var error: String?

        static func accepted(_ number: Int) -> Word { Word(number: number, status: 200, outcome: "accepted") }
        static func returned(_ number: Int) -> Word { Word(number: number, fate: "returned") }
    }

    /// The statement, so that a test can roll it back.
    static func finishing(_ words: [Word], by daemon: String) -> String {
        func text(_ value: Any?) -> String { value.map { "'\($0)'" } ?? "NULL" }
        let endings = words.map {
            "ROW(\($0.number), \(text($0.fate)), \(text($0.status)), NULL, NULL, '2026-01-01Z', \(text($0.pause)), \(text($0.error)), \(text($0.outcome)))"
        }
        return
            "SELECT tokenkeeper.finish_requests('\(daemon)', ARRAY[\(endings.joined(separator: ", "))]::tokenkeeper.request_ending[])"
    }

    @discardableResult
    func finish(_ words: [Word], by daemon: String = "a") throws -> Int {
        Int(try database.psql(Self.finishing(words, by: daemon), user: "a_daemon")) ?? -1
    }

    /// - Returns: The request_id of each claimed single request, and the number of its token.
    func claimSingle(by daemon: String = "a", most: Int = 1000, backgroundPerHour: Int = 0) throws -> [Int: Int] {
        Self.requests(
            try database.psql(
                """
                SELECT request_id, encode(token_key, 'hex')
                FROM tokenkeeper.claim_requests('production', '\(Self.topic)', '\(daemon)', \(most), \(backgroundPerHour), '-infinity') WHERE outcome = 'claimed'
                """, user: "a_daemon"))
    }

    func takeOver(_ daemon: String, sent: [Int]?) throws -> String {
        try database.psql(
            "SELECT requests, interrupted FROM tokenkeeper.take_over('\(daemon)', \(sent == nil), '{\((sent ?? []).map(String.init).joined(separator: ","))}')",
            user: "a_daemon")
    }

    /// `addressed|waiting|accepted|stale|suspect|suppressed|failed|cancelled|forgotten`.
    func progress(_ campaign: Int, user: String = "a_reader") throws -> String {
        try database.psql(
            "SELECT addressed, waiting, accepted, stale, suspect, suppressed, failed, cancelled, forgotten FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)",
            user: user)
    }

    /// Notes which campaigns have ended, as daemons do.
    func end() throws { try database.psql("SELECT tokenkeeper.end_campaigns()", user: "a_daemon") }

    func state(_ campaign: Int) throws -> String {
        try end()
        return try database.psql("SELECT state FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)")
    }

    func due() throws -> String {
        try database.psql(
            "SELECT campaign_id, has_batches, needs_addressing FROM tokenkeeper.campaigns_due()", user: "a_daemon")
    }

    func count(_ table: String, _ condition: String = "true") throws -> Int {
        Int(try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")) ?? -1
    }

    func delivery(_ number: Int, _ columns: String = "state", user: String = "owner") throws -> String {
        let apnsID = try database.psql(
            "SELECT tokenkeeper.campaign_apns_id(\(-number >> 32), \(-number & 0xffff_ffff))", user: "owner")
        return try database.psql("SELECT \(columns) FROM tokenkeeper.delivery('\(apnsID)')", user: user)
    }
}
