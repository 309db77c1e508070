/// How long a connection has been silent. Decides when to send a PING, and when to consider the connection dead. Pure.
struct Silence {
    enum Step: Equatable {
        case ping
        case isDead
    }

    /// When the last part of a response arrived; until then, when the connection began.
    private(set) var answeredAt: ContinuousClock.Instant
    private var heardAt: ContinuousClock.Instant
    private var askedAt: ContinuousClock.Instant
    private var pingedAt: ContinuousClock.Instant?
    /// When TLS stopped taking bytes; nil if no bytes wait.
    private var stuckSince: ContinuousClock.Instant?

    init(at now: ContinuousClock.Instant) {
        (answeredAt, heardAt, askedAt) = (now, now, now)
    }

    mutating func heard(at now: ContinuousClock.Instant) {
        heardAt = now
        pingedAt = nil
    }

    mutating func answered(at now: ContinuousClock.Instant) { answeredAt = now }

    /// A request was begun.
    mutating func asked(at now: ContinuousClock.Instant) { askedAt = now }

    /// - Parameters:
    ///   - isPending: Whether some bytes are still unwritten.
    ///   - hasMoved: Whether some bytes were written.
    mutating func wrote(isPending: Bool, hasMoved: Bool, at now: ContinuousClock.Instant) {
        stuckSince = isPending ? (hasMoved ? now : stuckSince ?? now) : nil
    }

    /// Whether bytes wait to be written.
    var isPending: Bool { stuckSince != nil }

    /// Whether a PING is unanswered, or bytes wait to be written.
    var isWaiting: Bool { pingedAt != nil || isPending }

    /// - Parameters:
    ///   - patience: How long a response may take.
    ///   - idle: How long a connection without requests may be silent.
    mutating func step(isBusy: Bool, patience: Duration, idle: Duration, at now: ContinuousClock.Instant) -> Step? {
        if let stuckSince, now - stuckSince > patience { return .isDead }
        if let pingedAt { return now - pingedAt > patience / 3 ? .isDead : nil }
        let isSilent = isBusy ? now - max(heardAt, askedAt) > patience / 3 : now - heardAt > idle
        guard isSilent else { return nil }
        pingedAt = now
        return .ping
    }
}
