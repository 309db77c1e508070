internal import TokenModel

/// Rows of a retry partition that PostgreSQL refuses, though it takes others: a trigger of somebody's raises for them, or only they need a right that is missing.
/// Nothing is wrong with them that the daemon could name, so they are kept, and each is tried alone, later each time.
///
/// In memory: after a restart, all are tried once more.
final class RefusedRows {
    /// A version of a row: its place, and the transaction that wrote it.
    struct Key: Hashable {
        var page: Int
        var line: Int
        var transaction: String
    }

    private struct Rest {
        var until: ContinuousClock.Instant
        var times: Int
    }

    private var rests: [Key: Rest] = [:]
    /// The last error.
    private(set) var error: DatabaseError?

    /// Whether PostgreSQL has also refused a row of ours.
    var areAll = false

    /// Whoever grants a missing right expects the row soon.
    private static let backoff = (
        data: Backoff(from: .seconds(5), to: .seconds(3600)), setup: Backoff(from: .seconds(1), to: .seconds(15))
    )
    /// A row that was not refused again for this long after its rest is gone.
    private static let forgets: Duration = .seconds(600)

    var isEmpty: Bool { rests.isEmpty }
    var count: Int { rests.count }

    func rests(_ row: Key, at now: ContinuousClock.Instant) -> Bool { rests[row].map { now < $0.until } ?? false }

    func refused(_ row: Key, _ error: DatabaseError, at now: ContinuousClock.Instant) {
        let times = rests[row]?.times ?? 0
        let backoff = error.remedy == .fixSetup ? Self.backoff.setup : Self.backoff.data
        rests[row] = Rest(until: now + backoff.pause(after: times).jittered(), times: times + 1)
        self.error = error
    }

    /// The row is gone.
    func took(_ row: Key) {
        rests[row] = nil
        areAll = false
        if rests.isEmpty { error = nil }
    }

    /// Forgets rows that others have taken.
    func prune(at now: ContinuousClock.Instant) {
        rests = rests.filter { now < $0.value.until + Self.forgets }
        if rests.isEmpty { error = nil }
    }
}
