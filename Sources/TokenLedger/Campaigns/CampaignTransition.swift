/// A campaign that has begun, goes on, was paused or cancelled, or has ended: for the log.
///
/// Each is returned once, by whichever daemon asks first. Campaigns of at most 100 requests are left out, unless they were paused or
/// cancelled: an application may create one for each message to a person.
public struct CampaignTransition: Sendable {
    public let number: Int64
    public let name: String?
    public let environment: String
    public let topic: String
    /// running, paused, cancelled or ended.
    public let state: String
    /// What was returned last; nil if nothing was.
    public let before: String?
    public let addressed: Int64
    /// How many requests have ended in each way so far, without those that have none.
    public let outcomes: [(name: String, requests: Int64)]

    /// The transitions since the last call of any daemon, at most 100.
    public static func takeNew(on connection: inout Connection) throws(DatabaseError) -> [CampaignTransition] {
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: .seconds(5))
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            let isNew = """
                state <> 'waiting' AND state IS DISTINCT FROM logged_state AND (addressed > 100 OR state IN ('paused', 'cancelled'))
                """
            // In most turns there is none, and nothing is written.
            let isSome = try connection.query("SELECT EXISTS (SELECT FROM tokenkeeper.campaign WHERE \(isNew))", [])
                .value(Bool.self)
            if !isSome { return [] }
            return try connection.query(
                """
                WITH new AS (
                    SELECT campaign_id, logged_state FROM tokenkeeper.campaign WHERE \(isNew)
                    ORDER BY campaign_id LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED
                ), taken AS (
                    UPDATE tokenkeeper.campaign AS c SET logged_state = c.state FROM new AS n WHERE c.campaign_id = n.campaign_id
                    RETURNING c.campaign_id, c.name, c.environment, c.topic, c.state, n.logged_state
                )
                SELECT t.campaign_id, t.name, t.environment, t.topic, t.state, t.logged_state, p.addressed,
                       \(CampaignProgress.outcomeNames.map { "p.\($0)::bigint" }.joined(separator: ", "))
                FROM taken AS t JOIN tokenkeeper.campaign_progress AS p ON p.campaign_id = t.campaign_id ORDER BY t.campaign_id
                """, []
            ).decode { row throws(DatabaseError) in
                CampaignTransition(
                    number: try row.read(), name: try row.read(), environment: try row.read(), topic: try row.read(),
                    state: try row.read(), before: try row.read(), addressed: try row.read(),
                    outcomes: try outcomes(&row))
            }
        }
    }

    private static func outcomes(_ row: inout Row) throws(DatabaseError) -> [(name: String, requests: Int64)] {
        var outcomes: [(name: String, requests: Int64)] = []
        for name in CampaignProgress.outcomeNames {
            let requests = try row.read(Int64.self)
            if requests > 0 { outcomes.append((name: name, requests: requests)) }
        }
        return outcomes
    }
}
