internal import Synchronization
internal import TokenModel

/// How many more rejected rows of a queue may be kept: a program that writes garbage must not fill the disk.
///
/// Two things count: the rows in the queue's table of rejected rows, whichever daemon put them there, and what this drain has added since it
/// last counted them. So no drain waits for a shared counter, and each further drain may exceed the limit by what it rejects within a
/// second.
final class RejectedAllowance: Sendable {
    private struct State {
        var perHour: Int64
        var used: Int64 = 0
        var readAt: ContinuousClock.Instant?
    }

    private let state: Mutex<State>
    private let queue: any Queue

    /// - Parameter perHour: How many rows may be kept within an hour; see `rows`.
    init(perHour: Int64, of queue: any Queue) {
        state = Mutex(State(perHour: perHour))
        self.queue = queue
    }

    /// How long a count is valid.
    private static let memory = Duration.seconds(1)

    var perHour: Int64 {
        get { state.withLock { $0.perHour } }
        set { state.withLock { $0.perHour = newValue } }
    }

    /// How many rows a row counts for: one for each 8 KiB of text, so that the limit also bounds the bytes.
    ///
    /// - Parameter bytes: The length of its texts.
    static func rows(of bytes: Int) -> Int64 { 1 + Int64(bytes) / 8192 }

    /// Counts the rejected rows in the open transaction, unless this drain has just done so.
    func refresh(on connection: inout Connection, now: ContinuousClock.Instant = .now) throws(DatabaseError) {
        let perHour: Int64? = state.withLock { state in
            if let readAt = state.readAt, readAt.duration(to: now) < Self.memory { return nil }
            return state.perHour
        }
        guard let perHour else { return }
        let used: Int64 = try connection.query(
            """
            SELECT coalesce(sum(1 + r.bytes / 8192), 0)::bigint
            FROM (SELECT \(queue.length) AS bytes FROM \(queue.rejectedTable)
                  WHERE attempts IS NULL AND rejected_at > now() - interval '1 hour' LIMIT $1) AS r
            """, [.int8(perHour)]
        ).value()
        state.withLock { state in
            state.used = used
            state.readAt = now
        }
    }

    /// Makes the next refresh count again. Needed after a rollback, which undoes what was added since the last one.
    func forgetCount() { state.withLock { $0.readAt = nil } }

    /// Whether one more result may be kept. If so, it counts.
    func takes(_ result: SendResult) -> Bool {
        // An operator has requeued it, so it was kept before: it must not get lost by coming back.
        if result.attempts != nil { return true }
        let texts = [
            result.environment, result.topic, result.token, result.status, result.body, result.apnsID,
        ]
        return takes(bytes: texts.reduce(0) { $0 + ($1?.utf8.count ?? 0) })
    }

    /// How many rows may still be kept, for a function that decides on the server.
    var left: Int64 { state.withLock { max(0, $0.perHour - $0.used) } }

    /// Notes rows that such a function has kept.
    func took(_ rows: Int64) { state.withLock { $0.used += rows } }

    func takes(bytes: Int) -> Bool {
        state.withLock { state in
            let rows = Self.rows(of: bytes)
            // A result larger than the limit is kept if it is the first of the hour: otherwise it never could be.
            guard state.used == 0 || state.used + rows <= state.perHour else { return false }
            state.used += rows
            return true
        }
    }
}
