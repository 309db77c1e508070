internal import TokenLedger
internal import TokenModel

/// Claimed requests whose turn a rate has not yet reached: each is sent at its own instant, or soon after it. Pure.
///
/// A daemon claims up to a second's worth of a rate at once. So the rate is kept evenly, and fully, although claims take their time.
///
/// Somebody may pause the topic or forget the token of a request that waits here. So a request is sent only if it was claimed or
/// looked up in the database a moment before. Most requests need one look-up at the most.
struct PacedRequests {
    private struct Held {
        let request: ClaimedRequest
        let sendAt: ContinuousClock.Instant
        /// When it was claimed, or last looked up.
        var knownAt: ContinuousClock.Instant

        /// Whether it is too long ago that it was known, once it can be sent.
        func needsLookUp(at now: ContinuousClock.Instant) -> Bool {
            knownAt + PacedRequests.knownFor < max(sendAt, now)
        }

        func isTooLate(at now: ContinuousClock.Instant) -> Bool { sendAt + PacedRequests.tooLate < now }
    }

    private struct Line {
        let scope: CredentialScope
        /// In the order of their instants.
        var requests: ArraySlice<Held> = []
        /// Whether a look-up has found that the topic or campaign of a request is paused: then that of the others may be, too.
        var isInDoubt = false

        mutating func lookedUp(_ numbers: Set<Int64>, paused: Set<Int64>, at now: ContinuousClock.Instant) {
            var (isPaused, isComplete) = (false, true)
            for place in requests.indices {
                let number = requests[place].request.number
                if numbers.contains(number) {
                    requests[place].knownAt = now
                    isPaused = isPaused || paused.contains(number)
                } else {
                    isComplete = false
                }
            }
            isInDoubt = isPaused && !isComplete
        }
    }

    private var lines: [SendState.Source: Line] = [:]
    /// The `request_id` of every request.
    private(set) var numbers: Set<Int64> = []

    /// A request that waits this long after its instant is late: the server responds more slowly than the rate.
    private static let tolerance: Duration = .milliseconds(50)

    /// A request that is later than this goes back, for a new instant: this process may have been stopped, and many would go at once.
    private static let tooLate: Duration = .seconds(10)

    /// A request is not sent if it was claimed or looked up longer ago than this. `forget` promises a second.
    private static let knownFor: Duration = .milliseconds(750)

    /// When to look requests up: so long before the first one of them is sent, and all that are sent within so long.
    private static let looksUp: (before: Duration, within: Duration) = (.milliseconds(100), .milliseconds(500))

    var isEmpty: Bool { lines.isEmpty }

    var sources: [(source: SendState.Source, scope: CredentialScope)] { lines.map { ($0.key, $0.value.scope) } }

    /// When the next request is to be sent that is not late.
    func next(after now: ContinuousClock.Instant) -> ContinuousClock.Instant? {
        lines.values.lazy.compactMap { $0.requests.first?.sendAt }.filter { $0 + Self.tolerance >= now }.min()
    }

    /// - Parameters:
    ///   - requests: What the turn has claimed with an instant, in order.
    ///   - now: Before the claim.
    mutating func add(_ requests: [ClaimedRequest], of turn: SendState.Turn, at now: ContinuousClock.Instant) {
        if requests.isEmpty { return }
        lines[turn.source, default: Line(scope: turn.scope)].requests += requests.map {
            Held(request: $0, sendAt: $0.sendAt ?? now, knownAt: now)
        }
        numbers.formUnion(requests.lazy.map(\.number))
    }

    /// Whether requests wait longer than their rate says. Then no more are claimed.
    func isLate(_ source: SendState.Source, at now: ContinuousClock.Instant) -> Bool {
        guard let sendAt = lines[source]?.requests.first?.sendAt else { return false }
        return sendAt + Self.tolerance < now
    }

    // MARK: - Look-ups

    /// The first request of each source: it shows whether the topic or campaign is paused, even if none is sent soon.
    var probes: [Int64] { lines.values.compactMap { $0.requests.first?.request.number } }

    /// The requests to look up now: those that are sent soon and not known then, and all whose topic or campaign may be paused.
    func toLookUp(at now: ContinuousClock.Instant) -> [Int64] {
        let isTime = lines.values.contains { line in
            line.isInDoubt
                || line.requests.lazy.prefix { $0.sendAt <= now + Self.looksUp.before }.contains {
                    $0.needsLookUp(at: now)
                }
        }
        if !isTime { return [] }
        return lines.values.flatMap { line in
            line.requests.lazy.prefix { line.isInDoubt || $0.sendAt <= now + Self.looksUp.within }
                .filter { line.isInDoubt || $0.needsLookUp(at: now) }.map(\.request.number)
        }
    }

    /// Requests were looked up. Those that must not be sent are withdrawn afterwards.
    ///
    /// - Parameters:
    ///   - numbers: Of any requests, here or not.
    ///   - paused: Those whose topic or campaign is paused.
    mutating func lookedUp(_ numbers: Set<Int64>, paused: Set<Int64>, at now: ContinuousClock.Instant) {
        if numbers.isDisjoint(with: self.numbers) { return }
        for source in Array(lines.keys) { lines[source]?.lookedUp(numbers, paused: paused, at: now) }
    }

    // MARK: - Taking requests out

    /// Takes out the requests whose instant has come, unless they are to be looked up first.
    mutating func release(_ source: SendState.Source, at now: ContinuousClock.Instant, most: Int) -> Released {
        guard let line = lines[source] else { return Released() }
        let due = line.requests.prefix(max(most, 0)).prefix {
            $0.sendAt <= now && (!$0.needsLookUp(at: now) || $0.isTooLate(at: now))
        }
        if due.isEmpty { return Released() }
        lines[source]?.requests.removeFirst(due.count)
        if due.count == line.requests.count { lines[source] = nil }
        numbers.subtract(due.lazy.map(\.request.number))
        var released = Released()
        for held in due {
            if held.isTooLate(at: now) { released.late.append(held.request) } else { released.due.append(held.request) }
        }
        return released
    }

    struct Released {
        /// To be sent.
        var due: [ClaimedRequest] = []
        /// To be given back.
        var late: [ClaimedRequest] = []
    }

    /// Takes out the requests that meet the condition.
    @discardableResult
    mutating func withdraw(where isMeant: (ClaimedRequest) -> Bool) -> [ClaimedRequest] {
        var withdrawn: [ClaimedRequest] = []
        for (source, line) in lines {
            let meant = line.requests.lazy.map(\.request).filter(isMeant)
            if meant.isEmpty { continue }
            withdrawn += meant
            lines[source]?.requests.removeAll { isMeant($0.request) }
            if lines[source]?.requests.isEmpty == true { lines[source] = nil }
        }
        numbers.subtract(withdrawn.lazy.map(\.number))
        return withdrawn
    }

    /// Takes out the requests with these numbers.
    @discardableResult
    mutating func withdraw(_ numbers: Set<Int64>) -> [ClaimedRequest] {
        if numbers.isDisjoint(with: self.numbers) { return [] }
        return withdraw { numbers.contains($0.number) }
    }
}
