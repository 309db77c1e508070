internal import ArgumentParser
internal import TokenLedger

/// `campaign show --watch`: a progress bar until the campaign has ended.
struct CampaignWatch {
    let number: Int64
    let json: Bool

    private static let pause: Duration = .milliseconds(500)

    /// Prints the state at the end.
    ///
    /// - Parameter unknown: The exit status if there is no such campaign.
    /// - Throws: The exit status 70 if a signal came before the end.
    func run(_ configuration: Configuration, unknown: () -> ExitCode) throws {
        let stop = ShutdownRequest.bySignal()
        let bell = Wakeup()
        stop.request.alsoRing(bell)
        try configuration.withLedgerOrRouter(writes: false, as: "tokenkeeper_reader") { connection in
            guard var campaign = try CampaignProgress.find(number, on: &connection) else { throw unknown() }
            var bar = ProgressBar(
                "campaign \(number)", items: "requests", total: campaign.total, steps: campaign.done,
                count: campaign.done)
            if let reason = campaign.waitsBecause { bar.wait(because: reason) }
            while !campaign.isOver, !stop.request.isAsked {
                bell.wait(for: Self.pause)
                guard let now = try CampaignProgress.find(number, on: &connection) else { break }
                bar.expect(total: now.total)
                if now.done > campaign.done { bar.advance(by: now.done - campaign.done) }
                if let reason = now.waitsBecause { bar.wait(because: reason) }
                campaign = now
            }
            bar.finish()
            if let text = try CampaignText.of(number, json: json, on: &connection) { print(text) }
            if !campaign.isOver { throw ExitCode(ExitStatus.failed.rawValue) }
        }
        withExtendedLifetime(stop) {}
    }
}
