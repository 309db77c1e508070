internal import TokenModel

/// What a worker does in turn: each chore fails alone. The others go on, and a chore that has failed is tried again later and later.
///
/// A pure value, except for the work itself: it decides what is due and remembers what has failed.
public struct Chores: Sendable {
    /// A chore that has failed and not succeeded since.
    public struct Failure: Equatable, Sendable {
        /// What cannot be done, as in "look for waves of 410s".
        public let chore: String
        /// Without data of rows.
        public let error: DatabaseError

        /// For `status`.
        public var words: String { "a daemon cannot \(chore): \(error)" }
    }

    private struct Pause {
        var failure: Failure
        var backoff: Backoff
        var until: ContinuousClock.Instant
    }

    private var pauses: [Pause] = []

    public init() {}

    /// What fails at the moment, the chore that failed first at the beginning.
    public var failures: [Failure] { pauses.map(\.failure) }

    /// How long a chore that has failed is left alone.
    private static let backoff = Backoff(from: .seconds(1), to: .seconds(60))

    /// Does a chore, unless it has failed a short time ago.
    ///
    /// - Parameters:
    ///   - chore: What it does, as in "look for waves of 410s".
    ///   - isRefusal: Whether an error that usually ends a connection is only the chore's: see `CheckedSchema`.
    /// - Returns: Nil if it was left alone or has failed.
    /// - Throws: Only if the connection is lost.
    @discardableResult
    public mutating func run<Value>(
        _ chore: String, on connection: inout Connection, now: ContinuousClock.Instant = .now,
        isRefusal: (DatabaseError, inout Connection) -> Bool = { _, _ in false },
        _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value? {
        if isPaused(chore, at: now) { return nil }
        do {
            let value = try work(&connection)
            succeeded(chore)
            return value
        } catch {
            if error.remedy == .reconnect, !isRefusal(error, &connection) { throw error }
            failed(chore, error, at: now)
            return nil
        }
    }

    func isPaused(_ chore: String, at now: ContinuousClock.Instant) -> Bool {
        pauses.contains { $0.failure.chore == chore && now < $0.until }
    }

    mutating func succeeded(_ chore: String) { pauses.removeAll { $0.failure.chore == chore } }

    mutating func failed(_ chore: String, _ error: DatabaseError, at now: ContinuousClock.Instant) {
        let failure = Failure(chore: chore, error: error.withoutData)
        let known = pauses.firstIndex { $0.failure.chore == chore }
        var backoff = known.map { pauses[$0].backoff } ?? Self.backoff
        let pause = backoff.next()
        // A lock of another session may be gone soon.
        let until = now + (error.remedy == .retry ? min(pause, .seconds(5)) : pause)
        let next = Pause(failure: failure, backoff: backoff, until: until)
        if let known { pauses[known] = next } else { pauses.append(next) }
    }
}

extension DatabaseError {
    /// The error with a message for people who may not see rows: PostgreSQL quotes values after a colon, and in messages about data
    /// anywhere.
    public var withoutData: DatabaseError {
        var shown = message
        if ["21", "22", "23", "P0"].contains(sqlState?.prefix(2) ?? "") {
            shown = String(shown.prefix { $0 != ":" && $0 != "\"" && $0 != "'" })
        }
        shown = DeviceToken.cut(in: String(shown.prefix(200)))
        while shown.last == " " { shown.removeLast() }
        return DatabaseError(kind, shown)
    }
}
