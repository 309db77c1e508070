internal import Logging
internal import TokenLedger

/// Logs when a large campaign begins, is paused or cancelled, goes on or ends. One daemon logs it, whichever notices it.
struct CampaignLog {
    private var again = ContinuousClock.now

    /// A campaign of a million requests takes a minute.
    private static let every: Duration = .seconds(2)

    /// Looks, if it is time. A lock of another session delays it.
    mutating func look(on connection: inout Connection, _ logger: Logger) throws(DatabaseError) {
        if .now < again { return }
        again = .now + Self.every
        do {
            for transition in try CampaignTransition.takeNew(on: &connection) { Self.note(transition, logger) }
        } catch let error where error.remedy == .retry {
            return
        }
    }

    static func note(_ campaign: CampaignTransition, _ logger: Logger) {
        var about: Logger.Metadata = [
            "campaign": "\(campaign.number)", "environment": "\(campaign.environment)", "topic": "\(campaign.topic)",
            "addressed": "\(campaign.addressed)",
        ]
        about["name"] = campaign.name.map { "\($0)" }
        for outcome in campaign.outcomes { about[outcome.name] = "\(outcome.requests)" }
        switch campaign.state {
        case "running" where campaign.before == nil: logger.notice("a campaign has begun", metadata: about)
        case "running": logger.notice("a campaign goes on", metadata: about)
        case "paused": logger.notice("a campaign is paused", metadata: about)
        case "cancelled": logger.notice("a campaign is cancelled", metadata: about)
        default: logger.notice("a campaign has ended", metadata: about)
        }
    }
}
