internal import TokenModel

/// A wave of 410s: far more of a topic's active tokens than usual have turned stale within an hour or a day. A mistake of APNs, a
/// sender or a proxy looks like that, and so does the first campaign after years.
///
/// The rule is in the view `tokenkeeper.stale_share`.
public struct StaleWave: Sendable {
    /// `production` or `sandbox`.
    public let environment: String
    public let topic: String
    /// How many active tokens have turned stale so far.
    public let tokens: Int64
    /// The active tokens, these included.
    public let active: Int64
    /// When the first of these 410s was received, in UTC.
    public let since: String
    /// The command that undoes the wave.
    public let undo: String

    /// The share of the active tokens that have turned stale, in percent, rounded down: `30%`.
    public var share: String { "\(active > 0 ? tokens * 100 / active : 0)%" }

    /// The waves that no daemon has noticed before.
    ///
    /// - Returns: Empty also while another session looks for them.
    public static func noticeNew(on connection: inout Connection) throws(DatabaseError) -> [StaleWave] {
        do {
            return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
                connection throws(DatabaseError) in
                try connection.query(
                    """
                    SELECT w.environment, w.topic, w.tokens, w.active, \(inUTC("w.since")), w.undo
                    FROM tokenkeeper.note_stale_waves() AS w
                    """
                ).decode { row throws(DatabaseError) in
                    StaleWave(
                        environment: try row.read(), topic: try row.read(), tokens: try row.read(),
                        active: try row.read(), since: try row.read(), undo: try row.read())
                }
            }
        } catch let error where error.remedy == .retry {
            return []
        }
    }
}
