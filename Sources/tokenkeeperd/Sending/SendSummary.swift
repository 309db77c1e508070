internal import Logging
internal import TokenLedger
internal import TokenModel

/// What the sending did, in at most one line a minute; and at once what a person should act upon.
struct SendSummary {
    private let logger: Logger
    private var answered = 0
    private var failed = 0
    private var later = 0
    private var suppressed = 0
    private var toldAt = ContinuousClock.now
    private var troubleToldAt: [String: ContinuousClock.Instant] = [:]

    private static let every: Duration = .seconds(60)
    private static let troubleEvery: Duration = .seconds(600)

    init(logger: Logger) {
        self.logger = logger
    }

    func begins(_ credentials: [LoadedCredential]) {
        for credential in credentials {
            let soon = Instant.now.advanced(byMicroseconds: 30 * 86_400_000_000)
            let expires = credential.expiresAt.map { $0 < soon } ?? false
            logger.log(
                level: expires ? .warning : .notice,
                expires ? "a certificate expires within 30 days, or has expired" : "sends to APNs",
                metadata: ["credential": "\(credential)"])
        }
    }

    mutating func add(_ ending: RequestEnding) {
        switch ending.fate {
        case .answered: answered += 1
        case .failed: failed += 1
        case .later, .interrupted: later += 1
        case .returned: break
        }
    }

    mutating func add(_ claim: Outbox.Claim) {
        suppressed += claim.suppressed
        failed += claim.failed
    }

    mutating func reportIfDue() {
        if toldAt.duration(to: .now) >= Self.every { report() }
    }

    /// Says what has come together since the last time.
    mutating func report() {
        defer { (answered, failed, later, suppressed, toldAt) = (0, 0, 0, 0, .now) }
        if answered + failed + later + suppressed == 0 { return }
        logger.info(
            "sent",
            metadata: [
                "answered": "\(answered)", "suppressed": "\(suppressed)", "to_try_again": "\(later)",
                "given_up": "\(failed)",
            ])
        if failed > 0 {
            logger.warning("requests were failed; see tokenkeeper.failed_send", metadata: ["requests": "\(failed)"])
        }
    }

    func paused(_ scope: Outbox.TopicScope, _ reason: String) {
        logger.error(
            "the sending of a topic is paused; when that is mended: SELECT tokenkeeper.resume_sending(topic, environment)",
            metadata: ["topic": "\(scope.topic)", "environment": "\(scope.environment)", "reason": "\(reason)"])
    }

    func leftInPeace(_ line: SendingHealth.Line, for pause: Duration, because words: String?) {
        logger.warning(
            "APNs is troubled or cannot be reached; requests wait",
            metadata: [
                "credential": "\(line.credential)", "environment": "\(line.environment)",
                "for": "\(DurationText.text(pause))",
                "last": "\(words ?? "")",
            ])
    }

    func takenOver(_ requests: Int) {
        if requests == 0 { return }
        logger.notice(
            "took over requests that a daemon had in hand when it ended; some of them may be sent a second time",
            metadata: ["requests": "\(requests)"])
    }

    /// What keeps requests waiting, again every ten minutes.
    mutating func report(waiting troubles: [String]) {
        troubleToldAt = troubleToldAt.filter { troubles.contains($0.key) }
        for trouble in troubles
        where troubleToldAt[trouble].map({ $0.duration(to: .now) > Self.troubleEvery }) ?? true {
            troubleToldAt[trouble] = .now
            logger.warning("\(trouble)")
        }
    }
}
