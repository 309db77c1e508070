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
        try configuration.withLedger(writes: false, as: CampaignCommand.viewer) { connection in
            guard let campaign = try CampaignProgress.find(number, on: &connection) else { throw unknown() }
            let isOver = try follow(campaign, on: &connection) {
                bell.wait(for: Self.pause)
                return !stop.request.isAsked
            }
            if let text = try CampaignText.of(number, json: json, on: &connection) { print(text) }
            if !isOver { throw ExitCode(ExitStatus.failed.rawValue) }
        }
        withExtendedLifetime(stop) {}
    }

    /// Shows a campaign until it is over, it is deleted, or a signal comes.
    ///
    /// - Parameter goesOn: Waits until it is time to look again; false if a signal has come.
    /// - Returns: Whether it is over.
    private func follow(
        _ first: CampaignProgress, on connection: inout Connection, while goesOn: () -> Bool
    ) throws(DatabaseError) -> Bool {
        var campaign = first
        var bar = ProgressBar(
            "campaign \(number)", items: "requests", total: campaign.total, steps: campaign.done, count: campaign.done)
        // Before an error is printed, too.
        defer { bar.finish() }
        if let reason = campaign.waitsBecause { bar.wait(because: reason) }
        while !campaign.isOver, goesOn() {
            guard let now = try CampaignProgress.find(number, on: &connection) else { break }
            bar.expect(total: now.total)
            if now.done > campaign.done { bar.advance(by: now.done - campaign.done) }
            if let reason = now.waitsBecause { bar.wait(because: reason) }
            campaign = now
        }
        return campaign.isOver
    }
}
