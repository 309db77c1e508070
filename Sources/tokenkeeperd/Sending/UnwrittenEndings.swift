internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// The endings of requests that the sender has decided but not yet written to the database. Pure.
struct UnwrittenEndings {
    private var endings: [RequestEnding] = []

    /// Endings of requests that another session has locked, such as an open transaction that has called `pause_campaign`.
    private var locked: [RequestEnding] = []
    private var locksMetAt: ContinuousClock.Instant?

    /// How soon to try again what is locked.
    static let retryLockedAfter: Duration = .milliseconds(200)

    /// The most endings of one transaction.
    static let batch = 1000

    /// So many unwritten endings are a backlog. Those that are locked count apart, because everything else goes on.
    private static let backlog = (free: 4 * batch, locked: 10 * batch)

    /// The most endings that are unwritten, apart from those of the requests in flight: a backlog, and what one more claim gives
    /// back at once.
    static let most = backlog.free + backlog.locked + 2 * batch

    /// Whether everything is written.
    var isEmpty: Bool { endings.isEmpty && locked.isEmpty }

    /// Whether so many endings are unwritten that nothing more should be claimed.
    var isBacklog: Bool { endings.count > Self.backlog.free || locked.count > Self.backlog.locked }

    /// The `request_id` of each unwritten ending.
    var numbers: Set<Int64> { Set(endings.map(\.number)).union(locked.map(\.number)) }

    mutating func add(_ ending: RequestEnding) {
        endings.append(ending)
    }

    /// Adds requests that go back to the outbox, as if they had not been tried.
    ///
    /// - Parameter pause: The shortest time that they wait; nil for no longer than before.
    mutating func giveBack(_ requests: [ClaimedRequest], after pause: Duration?) {
        endings += requests.map { RequestEnding(number: $0.number, fate: .returned(pause)) }
    }

    /// Adds claimed requests that this daemon does not know.
    mutating func giveBack(numbers: Set<Int64>) {
        endings += numbers.map { RequestEnding(number: $0, fate: .returned(nil)) }
    }

    /// Drops the endings of requests that this daemon has claimed again. They are in the database already, or too late: written now,
    /// they would end the new claims.
    mutating func areClaimedAgain(_ requests: [ClaimedRequest]) {
        if endings.isEmpty && locked.isEmpty || requests.isEmpty { return }
        let numbers = Set(requests.map(\.number))
        endings.removeAll { numbers.contains($0.number) }
        locked.removeAll { numbers.contains($0.number) }
    }

    /// What one transaction writes; nil if there is nothing.
    var next: [RequestEnding]? { endings.isEmpty ? nil : Array(endings.prefix(Self.batch)) }

    /// Removes what `next` returned: it is in the database.
    ///
    /// - Parameter skipped: The numbers of those endings that are not, because another session has locked their requests. They are put aside
    ///   until `retryLocked`.
    mutating func wrote(except skipped: Set<Int64> = [], at now: ContinuousClock.Instant = .now) {
        if !skipped.isEmpty {
            locked += endings.prefix(Self.batch).filter { skipped.contains($0.number) }
            locksMetAt = locksMetAt ?? now
        }
        endings.removeFirst(min(Self.batch, endings.count))
    }

    /// Tries again what was put aside, if it is time.
    mutating func retryLocked(at now: ContinuousClock.Instant) {
        guard let locksMetAt, locksMetAt.duration(to: now) >= Self.retryLockedAfter else { return }
        endings += locked
        locked = []
        self.locksMetAt = nil
    }
}

extension RequestEnding {
    /// How an attempt ended that the client reports, for the database.
    init(of claimed: ClaimedRequest, _ outcome: PushOutcome, _ step: RetryPolicy.Step) {
        self.init(number: claimed.number, fate: step.fate, sentAt: outcome.sentAt)
        // A response that is not from APNs says nothing about the token. Recorded as a result, it would make the token suspect.
        if case .foreign = step.blame { return }
        guard case .answered(let response) = outcome.end else { return }
        answer = Answer(
            status: response.status, body: response.body, apnsID: response.apnsID,
            meaning: Interpretation.meaning(of: response, for: claimed.request.address, sentAt: outcome.sentAt))
    }
}

extension Interpretation {
    /// How a campaign's request ends that was answered for good. A response that says nothing definite makes it suspect.
    static func meaning(of response: PushResponse, for address: TokenAddress, sentAt: Instant?) -> RequestEnding.Meaning
    {
        if response.status == 200 { return .accepted }
        // The token does not matter for the verdict.
        let result = SendResult(
            topic: address.topic.name, token: "00", status: String(response.status), body: response.body,
            sentAt: sentAt,
            queuedAt: .now)
        if case .stale = verdict(on: result) { return .stale }
        return .suspect
    }
}
