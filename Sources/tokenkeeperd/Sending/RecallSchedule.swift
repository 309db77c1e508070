/// Decides which requests that the clients have are looked up in the database, and when: somebody may have paused their topic or
/// forgotten their token since they were claimed. Pure.
///
/// A look-up costs the database some 15 µs for each request, and most requests end within one period. So only those that were already
/// held one period ago are looked up, and it takes up to two periods until a request is. A pause promises a second, of which the turn,
/// the look-up and the client need a part. `PacedRequests` says which of the others are looked up.
struct RecallSchedule {
    private var lookedUpAt: ContinuousClock.Instant?
    private var heldThen: Set<Int64> = []

    private static let period: Duration = .milliseconds(250)

    func isDue(at now: ContinuousClock.Instant) -> Bool {
        lookedUpAt.map { $0.duration(to: now) >= Self.period } ?? true
    }

    /// Begins a period.
    ///
    /// - Parameters:
    ///   - submitted: The `request_id` of the requests that a client has, or that wait behind one.
    ///   - paced: That of the requests that wait for their instant.
    /// - Returns: Those to look up.
    mutating func begin(
        with submitted: Set<Int64>, and paced: Set<Int64>, at now: ContinuousClock.Instant
    ) -> Set<Int64> {
        defer { (lookedUpAt, heldThen) = (now, submitted.union(paced)) }
        return submitted.intersection(heldThen)
    }
}
