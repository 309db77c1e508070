internal import Dispatch
internal import Logging
internal import TokenLedger
internal import TokenModel

/// The common part of all workers: keeps a connection, and connects again whenever it is lost.
///
/// Start here: `run` is the loop of every worker.
struct Worker: Sendable {
    let part: ServiceState.Part
    let settings: LiveConfiguration
    let timing: Timing
    let stop: ShutdownRequest
    /// Entered while a connection is in use. A shutdown waits for this, but not for an attempt to connect.
    let atWork: DispatchGroup
    /// Takes how long statements last.
    let statements: DurationHistogram
    let outages: OutageLog
    let report: ServiceNotifier
    /// Nil unless the drain has to apply migrations before anything else.
    let migration: MigrationStep?
    let logger: Logger

    /// The current settings.
    var configuration: Configuration { settings.current }

    /// The first lost connection within this time is not logged.
    private static let forgivesEvery: Duration = .seconds(60)

    /// How long a worker may be silent while it does not wait for the server.
    static let grace: Duration = .seconds(30)

    /// Waits until woken or until the time has passed.
    func rest(_ bell: Wakeup, for pause: Duration) {
        if stop.isAsked { return }
        report.beat(part, within: pause + Self.grace)
        bell.wait(for: pause)
        report.beat(part, within: Self.grace)
    }

    /// Reports the chores that fail at the moment. They do not stop the worker, but a person must act. Costs too much for each turn of a busy
    /// worker.
    func report(_ failures: [Chores.Failure], on connection: inout Connection) {
        report.cannot(failures, part)
        guard let failure = failures.first else { return }
        // The holder of a lock is visible only while it holds the lock.
        let holders = failure.error.remedy == .retry ? (try? LockHolder.all(on: &connection)) ?? [] : []
        outages.lost(failure.error, part, chore: failure.chore, holders: holders.filter(\.isOfWholeTable))
    }

    /// Connects. The connection reports to the watchdog whenever it waits for the server.
    func connect() throws(DatabaseError) -> Connection {
        try Connection(to: configuration.address, statements: statements) {
            [report, outages, part, migration, timing] within, silent in
            report.beat(part, within: within, unansweredFor: silent)
            // The statements of other workers may take longer, and so may a migration.
            if part == .drain, migration?.isDone ?? true, silent >= timing.longSilence {
                outages.silent(part, for: silent)
            }
        }
    }

    /// Connects, checks the schema and works. Repeats this after every error until the process shuts down.
    ///
    /// - Parameter work: Calls its last argument when it has made progress, and returns when the process shuts down.
    func run(bell: Wakeup, _ work: (inout Connection, CheckedSchema, _ succeeded: () -> Void) throws -> Void) {
        defer { report.left(part) }
        var backoff = timing.reconnect
        var forgivenAt: ContinuousClock.Instant?
        while !stop.isAsked {
            if part != .drain, let migration, !migration.isDone {
                rest(bell, for: .seconds(1))
                continue
            }
            var (worked, isRefusal) = (false, false)
            var schema: CheckedSchema?
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
                    let checked = CheckedSchema(fingerprint: try migrator.check(&connection))
                    schema = checked
                    outages.connected(part, to: connection.host)
                    try work(&connection, checked) {
                        worked = true
                        outages.reached(part)
                        backoff.reset()
                    }
                } catch let error as DatabaseError {
                    // The holder of a lock is visible only while it holds the lock.
                    if error.remedy == .retry {
                        holders = ((try? LockHolder.all(on: &connection)) ?? []).filter(\.isOfWholeTable)
                    }
                    isRefusal = schema?.isMissingFunction(error, on: &connection) ?? false
                    throw error
                }
            } catch let error as SchemaError {
                // Somebody migrates, or installs another release.
                outages.unfit(error, part)
                rest(bell, for: timing.unfitSchema)
            } catch let error as DatabaseError {
                // Servers close idle connections. A connection that is lost after useful work is not worth a log line, unless it
                // happens often.
                if worked, error.remedy == .reconnect, !isRefusal,
                    forgivenAt.map({ $0.duration(to: .now) > Self.forgivesEvery }) ?? true
                {
                    forgivenAt = .now
                } else {
                    outages.lost(
                        error, part, migrates: migration.map { !$0.isDone } ?? false, holders: holders)
                }
                rest(bell, for: backoff.next().jittered())
            } catch {
                preconditionFailure("a worker threw \(error)")
            }
        }
    }

    private func migrate(_ migrator: Migrator, on connection: inout Connection) throws {
        report.migrates(true)
        defer { report.migrates(false) }
        try migrator.migrate(&connection) { for line in $0.lines("applied") { logger.notice("\(line)") } }
    }
}
