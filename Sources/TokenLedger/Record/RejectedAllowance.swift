internal import Synchronization
internal import TokenModel

/// How many rejected results may still be kept: a sender that writes garbage fills `result_count` by a few rows, and not the disk.
///
/// The rows that lie in `rejected_result` count, whichever daemon has put them there, and this drain's own since they were counted
/// last. So nobody waits for a counter, and each further drain may keep more than the limit by what it rejects within a second.
final class RejectedAllowance: Sendable {
    private struct State {
        var perHour: Int64
        var used: Int64 = 0
        var readAt: ContinuousClock.Instant?
    }

    private let state: Mutex<State>

    /// - Parameter perHour: The most rows within an hour; see `rows`.
    init(perHour: Int64) {
        state = Mutex(State(perHour: perHour))
    }

    /// How long a count is good for.
    private static let memory = Duration.seconds(1)

    var perHour: Int64 {
        get { state.withLock { $0.perHour } }
        set { state.withLock { $0.perHour = newValue } }
    }

    /// As how many rows a result counts: one for each 8 KiB of text, so that the limit is also one of bytes.
    ///
    /// - Parameter bytes: The length of its texts.
    static func rows(of bytes: Int) -> Int64 { 1 + Int64(bytes) / 8192 }

    /// Counts what lies there, unless that was done a moment ago; in the transaction that is open.
    func refresh(on connection: inout Connection, now: ContinuousClock.Instant = .now) throws(DatabaseError) {
        let perHour: Int64? = state.withLock { state in
            if let readAt = state.readAt, readAt.duration(to: now) < Self.memory { return nil }
            return state.perHour
        }
        guard let perHour else { return }
        let used = try connection.query(
            """
            SELECT coalesce(sum(1 + r.bytes / 8192), 0)::bigint
            FROM (SELECT \(Batch.length) AS bytes FROM tokenkeeper.rejected_result
                  WHERE attempts IS NULL AND rejected_at > now() - interval '1 hour' LIMIT $1) AS r
            """, [.int8(perHour)]
        ).integer(0, 0)
        state.withLock { state in
            state.used = used ?? 0
            state.readAt = now
        }
    }

    /// The next refresh counts anew: what was taken since the last one has been rolled back.
    func forgetCount() { state.withLock { $0.readAt = nil } }

    /// Whether one more result may be kept; then it counts.
    func takes(_ result: SendResult) -> Bool {
        // What an operator has requeued was kept before: it must not get lost by coming back.
        if result.attempts != nil { return true }
        let texts = [result.environment, result.topic, result.token, result.body, result.apnsID]
        return takes(bytes: texts.reduce(0) { $0 + ($1?.utf8.count ?? 0) })
    }

    func takes(bytes: Int) -> Bool {
        state.withLock { state in
            let rows = Self.rows(of: bytes)
            // One that is larger than the limit is kept when it is the first of the hour: else it never could be.
            guard state.used == 0 || state.used + rows <= state.perHour else { return false }
            state.used += rows
            return true
        }
    }
}
