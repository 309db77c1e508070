internal import TokenLedger

/// Claimed requests whose turn a rate has not yet reached: each is sent at its own instant, or soon after it. Pure.
///
/// A daemon claims up to a second's worth of a rate at once. So the rate is kept evenly, and fully, although claims take their time.
struct PacedRequests {
    private struct Line {
        let scope: CredentialScope
        /// In the order of their instants.
        var requests: ArraySlice<ClaimedRequest>
    }

    private var lines: [SendState.Source: Line] = [:]

    /// A request that waits this long after its instant is late: the server responds more slowly than the rate.
    private static let tolerance: Duration = .milliseconds(50)

    /// A request that is later than this is not sent: this process may have been stopped, and another daemon may have it.
    static let tooLate: Duration = .seconds(10)

    var isEmpty: Bool { lines.isEmpty }

    /// The `request_id` of every request of some sources.
    func numbers(of isMeant: (SendState.Source) -> Bool = { _ in true }) -> Set<Int64> {
        lines.reduce(into: []) { numbers, line in
            if isMeant(line.key) { numbers.formUnion(line.value.requests.map(\.number)) }
        }
    }

    var sources: [(source: SendState.Source, scope: CredentialScope)] { lines.map { ($0.key, $0.value.scope) } }

    /// When the next request is to be sent that is not late.
    func next(after now: ContinuousClock.Instant) -> ContinuousClock.Instant? {
        lines.values.lazy.compactMap { $0.requests.first?.sendAt }.filter { $0 + Self.tolerance >= now }.min()
    }

    /// - Parameter requests: What the turn has claimed with an instant, in order.
    mutating func add(_ requests: [ClaimedRequest], of turn: SendState.Turn) {
        if requests.isEmpty { return }
        lines[turn.source, default: Line(scope: turn.scope, requests: [])].requests += requests
    }

    /// Whether requests wait longer than their rate says. Then no more are claimed.
    func isLate(_ source: SendState.Source, at now: ContinuousClock.Instant) -> Bool {
        guard let sendAt = lines[source]?.requests.first?.sendAt else { return false }
        return sendAt + Self.tolerance < now
    }

    /// Takes out the requests whose instant has come.
    mutating func release(
        _ source: SendState.Source, at now: ContinuousClock.Instant, most: Int
    ) -> [ClaimedRequest] {
        guard var line = lines[source] else { return [] }
        let due = line.requests.prefix(max(most, 0)).prefix { $0.sendAt.map { $0 <= now } ?? true }
        line.requests.removeFirst(due.count)
        lines[source] = line.requests.isEmpty ? nil : line
        return Array(due)
    }

    /// Takes out the requests that meet the condition.
    @discardableResult
    mutating func withdraw(where isMeant: (ClaimedRequest) -> Bool) -> [ClaimedRequest] {
        var withdrawn: [ClaimedRequest] = []
        for (source, line) in lines {
            let meant = line.requests.filter(isMeant)
            if meant.isEmpty { continue }
            withdrawn += meant
            let kept = line.requests.filter { !isMeant($0) }
            lines[source] = kept.isEmpty ? nil : Line(scope: line.scope, requests: kept[...])
        }
        return withdrawn
    }
}
