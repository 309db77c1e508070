internal import Dispatch
internal import Logging
internal import TokenLedger
internal import TokenModel

/// Addresses campaigns whose audience takes long to find, on a connection of its own: a few of many millions that are not in memory.
///
/// The connection is opened for such a campaign and closed soon afterwards. If it cannot be opened, only these campaigns wait.
struct AddressingWorker {
    let worker: Worker
    let daemonID: String
    let audiences: SlowAudiences
    /// Rung by a shutdown: cancels a search.
    let cancel = Wakeup()

    /// After this long without such a campaign, the connection is closed.
    private static let keptFor: Duration = .seconds(30)

    func run() {
        while !worker.stop.isAsked {
            let wanted = audiences.wanted
            if wanted.isEmpty || !worker.report.isComplete {
                audiences.wakeup.wait(for: wanted.isEmpty ? .seconds(60) : .seconds(1))
                continue
            }
            do { try address() } catch {
                if worker.stop.isAsked { return }
                // When PostgreSQL itself is unreachable, the other workers notice and report it.
                let reason = (error as? DatabaseError) ?? DatabaseError(.connection, "\(error)")
                for source in audiences.wanted { audiences.failed(source, reason) }
            }
        }
    }

    /// Opens the connection, and addresses until there has been nothing to do for a while.
    private func address() throws {
        defer { worker.report.left(worker.part) }
        worker.report.beat(worker.part, within: Worker.grace)
        var connection = try worker.connect()
        worker.atWork.enter()
        defer { worker.atWork.leave() }
        try Migrator(daemon: Daemon.version).check(&connection)
        var neededAt = ContinuousClock.now
        while !worker.stop.isAsked, neededAt.duration(to: .now) < Self.keptFor {
            let outbox = Outbox(daemonID: daemonID, processScope: "", lockTimeout: worker.configuration.lockTimeout)
            var isAhead = true
            for source in audiences.wanted where !worker.stop.isAsked {
                neededAt = .now
                worker.report.beat(worker.part, within: Worker.grace)
                if try address(source, outbox, on: &connection) != nil { isAhead = false }
            }
            if isAhead { worker.rest(audiences.wakeup, for: DueCampaigns.lookEvery) }
        }
    }

    /// Addresses a part of a campaign.
    ///
    /// - Returns: How many requests were added. Nil if there was nothing to do, or it failed.
    private func address(
        _ source: SendState.Source, _ outbox: Outbox, on connection: inout Connection
    ) throws(DatabaseError) -> Int? {
        guard let campaign = source.campaign else { return nil }
        let search = audiences.search(for: source)
        do throws(DatabaseError) {
            return try outbox.address(
                campaign, ahead: SlowAudiences.ahead, by: search, cancelWhen: cancel, on: &connection)
        } catch {
            if worker.stop.isAsked { return nil }
            // Another campaign may have no such trouble.
            if error.remedy == .reconnect { throw error }
            if case .patient(let time) = search, SlowAudiences.tookTooLong(error) {
                audiences.tookTooLong(source, within: time)
            } else {
                audiences.failed(source, error)
            }
            return nil
        }
    }
}
