internal import APNsFeedback
internal import Logging
internal import TokenLedger
internal import TokenModel

/// Logs what the sender did, in at most one line per minute. Logs at once what a person should act on.
struct SendSummary {
    private let logger: Logger
    private var answered = 0
    private var failed = 0
    private var retried = 0
    private var suppressed = 0
    private var loggedAt = ContinuousClock.now
    /// The causes of the notices that were logged.
    private var noticed: Set<String> = []
    /// By their cause.
    private var logged: [String: (at: ContinuousClock.Instant, words: String)] = [:]

    private static let every: Duration = .seconds(60)
    private static let problemEvery: Duration = .seconds(600)
    /// A certificate that expires within 30 days is worth a warning.
    private static let expiryNotice: Int64 = 30 * 86_400_000_000

    init(logger: Logger) {
        self.logger = logger
    }

    func begins(_ credentials: [CredentialSource]) {
        for credential in credentials.compactMap(\.loaded) {
            let soon = Instant.now.advanced(byMicroseconds: Self.expiryNotice)
            let expires = credential.expiresAt.map { $0 < soon } ?? false
            logger.log(
                level: expires ? .warning : .notice,
                expires ? "a certificate expires within 30 days, or has expired" : "sends to APNs",
                metadata: ["credential": "\(credential)"])
        }
    }

    func renewed(_ credential: CredentialSource) {
        logger.notice("the files of a credential have changed, and are used", metadata: ["credential": "\(credential)"])
    }

    mutating func add(_ ending: RequestEnding) {
        switch ending.fate {
        case .answered: answered += 1
        case .failed: failed += 1
        case .later, .refused, .interrupted: retried += 1
        case .returned: break
        }
    }

    /// Names responses of the sandbox by the identifier that Apple's Push Notifications Console knows.
    func named(_ outcomes: [PushOutcome]) {
        guard logger.logLevel <= .debug else { return }
        for outcome in outcomes {
            guard case .answered(let answer) = outcome.end, let uniqueID = answer.uniqueID else { continue }
            logger.debug(
                "the sandbox has answered",
                metadata: [
                    "status": "\(answer.status)", "apns_id": "\(outcome.request.id)", "apns_unique_id": "\(uniqueID)",
                ])
        }
    }

    mutating func add(_ claim: Outbox.Claim) {
        suppressed += claim.suppressed
        failed += claim.failed
    }

    mutating func reportIfDue() {
        if loggedAt.duration(to: .now) >= Self.every { report() }
    }

    /// Logs the counts since the last time, if there are any.
    mutating func report() {
        defer { (answered, failed, retried, suppressed, loggedAt) = (0, 0, 0, 0, .now) }
        if answered + failed + retried + suppressed == 0 { return }
        logger.info(
            "sent",
            metadata: [
                "answered": "\(answered)", "suppressed": "\(suppressed)", "retried": "\(retried)",
                "failed": "\(failed)",
            ])
        if failed > 0 {
            logger.warning("requests failed; see tokenkeeper.failed_send", metadata: ["requests": "\(failed)"])
        }
    }

    func pauses(for pause: Duration, why: String) {
        logger.debug(
            "a pause begins, then one request at a time is tried",
            metadata: ["for": "\(DurationText.text(pause))", "why": "\(why)"])
    }

    func blamed(_ scope: CredentialScope, _ goAway: PushGoAway) {
        logger.warning(
            "APNs ends connections and blames the sender; check the credential",
            metadata: [
                "credential": "\(scope.credential)", "environment": "\(scope.environment)",
                "reason": "\(goAway.reason ?? "")", "last": "\(goAway.message)",
            ])
    }

    func tookOver(_ taken: Outbox.TakenOver) {
        if taken.requests == 0 { return }
        logger.notice(
            "took over the requests of a daemon that has ended; those that were in flight may be sent twice",
            metadata: ["requests": "\(taken.requests)", "in_flight": "\(taken.interrupted)"])
    }

    /// Logs each notice once, as long as it stays.
    mutating func report(notices: [WaitingProblem]) {
        for notice in notices where !noticed.contains(notice.cause) { logger.warning("\(notice.words)") }
        noticed = Set(notices.map(\.cause))
    }

    /// Logs each cause that keeps requests waiting, again every ten minutes while it lasts, and its end.
    mutating func report(waiting problems: [WaitingProblem]) {
        let causes = Set(problems.map(\.cause))
        for (cause, problem) in logged.sorted(by: { $0.key < $1.key }) where !causes.contains(cause) {
            logged[cause] = nil
            logger.notice("this no longer keeps requests waiting", metadata: ["problem": "\(problem.words)"])
        }
        for problem in problems
        where logged[problem.cause].map({ $0.at.duration(to: .now) > Self.problemEvery }) ?? true {
            logged[problem.cause] = (.now, problem.words)
            logger.warning("\(problem.words)")
        }
    }
}
