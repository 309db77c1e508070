internal import Dispatch
internal import Logging
internal import TokenLedger

/// What drain and sweep have in common: a connection that is made again whenever it is lost.
struct Duty: Sendable {
    let configuration: Configuration
    let stop: Stop
    /// Held while a connection is in use: who wants to leave waits for this, and not for an attempt to connect.
    let atWork: DispatchGroup
    let availability: Availability
    /// Called when a person must act before this process can go on.
    let giveUp: @Sendable (SchemaError) -> Void
    /// Apply what migrations are missing before working.
    let migrates: Bool
    let logger: Logger

    /// Connects, checks the schema, works; and again from the start until the process is to end.
    ///
    /// - Parameter work: Calls its second argument when it has got something done, and returns when the process is to end.
    func run(bell: Wakeup, _ work: (inout Connection, _ succeeded: () -> Void) throws -> Void) {
        var backoff = Backoff()
        while !stop.isAsked {
            var worked = false
            do {
                var connection = try Connection(to: configuration.address)
                atWork.enter()
                defer { atWork.leave() }
                if stop.isAsked { return }
                let migrator = Migrator(daemon: Daemon.version)
                if migrates {
                    try migrator.migrate(&connection) {
                        logger.notice("applied migration \($0.version)", metadata: ["name": "\($0.name)"])
                    }
                }
                try migrator.check(&connection)
                try work(&connection) {
                    worked = true
                    availability.reached()
                    backoff.reset()
                }
            } catch let error as SchemaError {
                return giveUp(error)
            } catch let error as DatabaseError {
                // One that is lost and had again at once is no news: servers close idle connections.
                if !(worked && error.remedy == .reconnect) { availability.lost(error) }
                bell.wait(for: backoff.pause())
            } catch {
                preconditionFailure("a duty throws \(error)")
            }
        }
    }
}
