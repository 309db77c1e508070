internal import Dispatch
internal import Logging
internal import TokenLedger

/// What the workers have in common: a connection that is made again whenever it is lost.
struct Worker: Sendable {
    let part: ServiceState.Part
    let settings: LiveConfiguration
    let stop: ShutdownRequest
    /// Held while a connection is in use: who wants to leave waits for this, and not for an attempt to connect.
    let atWork: DispatchGroup
    let outages: OutageLog
    let report: ServiceNotifier
    /// Called when a person must act before this process can go on.
    let giveUp: @Sendable (SchemaError) -> Void
    /// Nil unless migrations are to be applied before anything else: the drain does.
    let migration: MigrationStep?
    let logger: Logger

    /// The settings in force at this moment.
    var configuration: Configuration { settings.current }

    /// So often a connection may be lost without a word.
    private static let forgivesEvery: Duration = .seconds(60)

    /// How long it may be silent while it does something of its own.
    static let grace: Duration = .seconds(30)

    /// Waits for the bell, or until the time has passed.
    func rest(_ bell: Wakeup, for pause: Duration) {
        if stop.isAsked { return }
        report.beat(part, within: pause + Self.grace)
        bell.wait(for: pause)
        report.beat(part, within: Self.grace)
    }

    /// Connects, and is heard of while it waits for the server, now and later.
    func connect() throws(DatabaseError) -> Connection {
        try Connection(to: configuration.address) { [report, part] within, silent in
            report.beat(part, within: within, unansweredFor: silent)
        }
    }

    /// Connects, checks the schema, works; and again from the start until the process is to end.
    ///
    /// - Parameter work: Calls its second argument when it has got something done, and returns when the process is to end.
    func run(bell: Wakeup, _ work: (inout Connection, _ succeeded: () -> Void) throws -> Void) {
        defer { report.left(part) }
        var backoff = Backoff()
        var forgivenAt: ContinuousClock.Instant?
        while !stop.isAsked {
            if part != .drain, let migration, !migration.isDone {
                rest(bell, for: .seconds(1))
                continue
            }
            var worked = false
            var holders: [LockHolder] = []
            report.connecting(part, within: Self.grace)
            do {
                var connection = try connect()
                atWork.enter()
                defer { atWork.leave() }
                if stop.isAsked { return }
                do {
                    let migrator = Migrator(daemon: Daemon.version)
                    if let migration, !migration.isDone {
                        try migrate(migrator, on: &connection)
                        migration.finish()
                    }
                    try migrator.check(&connection)
                    outages.connected(part)
                    try work(&connection) {
                        worked = true
                        outages.reached(part)
                        backoff.reset()
                    }
                } catch let error as DatabaseError where error.remedy == .retry {
                    // Only as long as a lock is held can it be found who holds it.
                    holders = ((try? LockHolder.all(on: &connection)) ?? []).filter(\.isOfWholeTable)
                    throw error
                }
            } catch let error as SchemaError {
                return giveUp(error)
            } catch let error as DatabaseError {
                // One that is lost and had again at once is no news: servers close idle connections. Not every time, though.
                if worked, error.remedy == .reconnect,
                    forgivenAt.map({ $0.duration(to: .now) > Self.forgivesEvery }) ?? true
                {
                    forgivenAt = .now
                } else {
                    outages.lost(
                        error, part, migrates: migration.map { !$0.isDone } ?? false, holders: holders)
                }
                rest(bell, for: backoff.pause())
            } catch {
                preconditionFailure("a worker throws \(error)")
            }
        }
    }

    private func migrate(_ migrator: Migrator, on connection: inout Connection) throws {
        report.migrates(true)
        defer { report.migrates(false) }
        try migrator.migrate(&connection) { for line in $0.lines("applied") { logger.notice("\(line)") } }
    }
}
