/// A sweep that the running daemons perform for a role that may not sweep itself.
public struct RequestedSweep: Sendable {
    /// `sweep_run.run_id`.
    public let runID: Int64

    /// Asks for a sweep. Needs the rights of `tokenkeeper_operator`. A daemon starts it within seconds, or once the current sweep has ended.
    public init(dryRun: Bool, forced: Bool, on connection: inout Connection) throws(DatabaseError) {
        runID = try connection.query(
            "SELECT tokenkeeper.request_sweep($1, $2)", [.bool(dryRun), .bool(forced)]
        ).value()
    }

    /// What has become of it.
    public enum Progress: Sendable {
        case ended(SweepReport)
        /// A daemon is at work, or will begin.
        case waiting
        /// No daemon is running.
        case abandoned
    }

    /// Looks it up.
    public func progress(on connection: inout Connection) throws(DatabaseError) -> Progress {
        if let report = try SweepReport.ended(runID, on: &connection) { return .ended(report) }
        return try Self.hasDaemon(on: &connection) ? .waiting : .abandoned
    }

    /// Whether a daemon has reported within the last 30 seconds, as in the view `status`.
    public static func hasDaemon(on connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            """
            SELECT EXISTS (SELECT FROM tokenkeeper.daemon AS d WHERE \(Heartbeat.isLiveInSQL))
            """
        ).value()
    }
}
