import Foundation
import LedgerTestSupport

/// The real daemon on a database.
final class MeasuredDaemon {
    private let process: DaemonProcess
    private let reaper: Reaper

    /// Polls often: freshness measures how long an idle daemon waits, and the drain does not.
    static let brisk = ["drain.poll_idle=50ms", "sweep.interval=off"]

    /// The same, but without a second connection for a backlog.
    static let briskAlone = brisk + ["drain.second_connection=off"]

    init(_ database: Database, settings: [String] = brisk, overTLS: Bool = false, environment: [String: String] = [:])
        throws
    {
        process = try DaemonProcess(database.url(overTLS: overTLS), settings: settings, environment: environment)
        reaper = try Reaper(of: process.pid)
    }

    var pid: Int32 { process.pid }

    /// Starts this many daemons on a database, and waits until each has looked at the queue.
    static func start(
        _ count: Int = 1, on database: Database, settings: [String] = brisk, overTLS: Bool = false
    ) throws -> [MeasuredDaemon] {
        let daemons = try (0..<count).map { _ in
            try MeasuredDaemon(database, settings: settings, overTLS: overTLS)
        }
        let session = try database.session()
        do {
            try eventually("\(count) daemons at work", within: 30) {
                try daemons.allSatisfy(\.process.isRunning)
                    && session.number("SELECT count(*) FROM tokenkeeper.daemon WHERE stopped_at IS NULL")
                        == Double(count)
            }
        } catch {
            throw TestFailure("\(error); the first says: \(daemons[0].logged)")
        }
        return daemons
    }

    /// Waits for the first sweep, which is due at once, and for the work after it. Then the daemons are at rest.
    static func rest(_ session: Session, seconds: Int) throws {
        try eventually("the first sweep is over", within: 600) {
            try session.number("SELECT count(*) FROM tokenkeeper.sweep_run WHERE finished_at IS NOT NULL") > 0
        }
        Thread.sleep(forTimeInterval: Double(seconds))
    }

    /// Stops the daemon between two statements, so that work can be queued for it.
    ///
    /// A lock on a range would not be enough: a daemon that finds a range locked continues elsewhere, and comes back later.
    static func pause(_ daemons: [MeasuredDaemon], on session: Session) throws {
        for daemon in daemons {
            try eventually("a daemon between two statements", within: 20) {
                daemon.process.signal(SIGSTOP)
                usleep(2000)
                if try session.number(
                    """
                    SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
                    """) == 0
                {
                    return true
                }
                daemon.process.signal(SIGCONT)
                return false
            }
        }
    }

    static func resume(_ daemons: [MeasuredDaemon]) {
        for daemon in daemons { daemon.process.signal(SIGCONT) }
    }

    @discardableResult
    func stop() -> Int32 {
        process.signal(SIGCONT)
        defer { reaper.dismiss() }
        return process.stop()
    }

    var logged: String { process.logged }
}
