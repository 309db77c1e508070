/// Decides which claimed requests to look up in the database, and when: somebody may have paused their topic or forgotten their token
/// since they were claimed. Pure.
///
/// A look-up costs the database some 15 µs for each request, and most requests end within one period. So only those that were already
/// held one period ago are looked up.
struct RecallSchedule {
    private var lookedUpAt: ContinuousClock.Instant?
    private var heldThen: Set<Int64> = []

    private static let period: Duration = .milliseconds(500)

    func isDue(at now: ContinuousClock.Instant) -> Bool {
        lookedUpAt.map { $0.duration(to: now) >= Self.period } ?? true
    }

    /// Begins a period.
    ///
    /// - Parameters:
    ///   - held: The `request_id` of the claimed requests.
    ///   - others: Those to look up in any case.
    /// - Returns: Those to look up.
    mutating func begin(
        with held: Set<Int64>, and others: Set<Int64> = [], at now: ContinuousClock.Instant
    ) -> [Int64] {
        defer { (lookedUpAt, heldThen) = (now, held) }
        return Array(held.intersection(heldThen).union(others))
    }
}
