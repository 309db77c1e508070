public import TokenModel

/// What becomes of a request after each outcome, and of those behind it. Pure.
///
/// Source of what is worth another try, and when: Apple, "Handling notification responses from APNs".
public struct RetryPolicy: Sendable, Equatable {
    /// How long after it was first sent a request is tried again.
    public var retryFor: Duration

    public init(retryFor: Duration) {
        self.retryFor = retryFor
    }

    /// What one outcome means.
    public struct Step: Sendable, Equatable {
        public var fate: RequestFate
        public var blame: Blame

        public init(_ fate: RequestFate, _ blame: Blame = .nobody) {
            self.fate = fate
            self.blame = blame
        }
    }

    /// Whom the outcome speaks of, beside the request.
    public enum Blame: Sendable, Equatable {
        case nobody
        /// The device token: others for the same one wait until the ledger has learned of it, or as long as this one.
        case token
        /// This one message. Many in a row are a fault of who makes them.
        case message(String)
        /// The topic's configuration or credentials: the same would befall all that wait.
        case topic(String)
        /// APNs does not send such a response: something between the daemon and APNs did. A few in a row pause the topic.
        case foreign(String)
        /// The server is troubled or cannot be reached. Many in a row: all that wait had better wait on.
        case server
        /// The credential asks for a pause of that length.
        case credential(Duration)
    }

    /// - Parameters:
    ///   - attempts: How often the request has been tried in vain before.
    ///   - firstSentAt: When it was first tried.
    ///   - now: By the same clock, more or less.
    public func step(
        after end: PushOutcome.End, of request: PushRequest, attempts: Int, firstSentAt: Instant, now: Instant
    ) -> Step {
        switch end {
        case .withdrawn: return Step(.returned(nil))
        case .unsendable(let fault): return Step(.failed(fault))
        case .answered(let answer):
            return step(
                after: answer, Try(of: request, attempts: attempts, firstSentAt: firstSentAt, now: now))
        case .unanswered(let failure):
            switch failure.kind {
            case .backingOff: return Step(.returned(failure.retryAfter ?? .seconds(1)), .server)
            case .stopped where !failure.mayHaveArrived: return Step(.returned(nil))
            case .identity: return Step(.returned(nil), .topic(failure.message))
            default:
                let blame = failure.kind == .stopped ? Blame.nobody : .server
                let attempt = Try(of: request, attempts: attempts, firstSentAt: firstSentAt, now: now)
                let pause = failure.kind == .stopped ? .zero : Self.growing(.seconds(5), attempts, to: .seconds(300))
                let fate = again(after: pause, failure.message, attempt)
                // It shall not be shown again and again because a server takes it and does not answer.
                if failure.mayHaveArrived, case .later(let pause, let words) = fate {
                    return Step(.interrupted(pause, words), blame)
                }
                return Step(fate, blame)
            }
        }
    }

    /// One try of a request.
    private struct Try {
        var of: PushRequest
        var attempts: Int
        var firstSentAt: Instant
        var now: Instant
    }

    private func step(after answer: PushResponse, _ attempt: Try) -> Step {
        let body = ResponseBody(answer.body)
        let reason = body.reason
        let words = "APNs answered \(answer.status) \(reason ?? Verdict.noReason)"
        switch (answer.status, reason) {
        case (200, _): return Step(.answered)
        case (410, _?) where body.timestamp != nil: return Step(.answered, .token)
        case (400, let reason?) where Interpretation.suspectReasons.contains(reason): return Step(.answered, .token)
        case (400, "IdleTimeout"): return Step(again(after: .seconds(1), words, attempt))
        case (429, "TooManyProviderTokenUpdates"):
            let pause = Duration.seconds(20 * 60)
            return Step(again(after: pause, words, attempt), .credential(pause))
        case (429, _):
            return Step(
                again(after: Self.growing(.seconds(60), attempt.attempts, to: .seconds(3600)), words, attempt), .token)
        case (500...599, _):
            let pause = Self.growing(.seconds(15 * 60), attempt.attempts, to: .seconds(4 * 3600))
            return Step(again(after: pause, words, attempt), .server)
        case (400, "BadTopic"), (400, "MissingTopic"), (400, "TopicDisallowed"), (400, "MissingDeviceToken"),
            (400, "DuplicateHeaders"), (403, _), (404, _), (405, _):
            return Step(.returned(nil), .topic(words))
        // PayloadTooLarge, BadPriority and the like; and new reasons, which appear without notice.
        case (400, _), (413, _): return Step(.failed(words), .message(words))
        default: return foreign(answer.status, attempt)
        }
    }

    /// So often a request is tried that gets responses which are not from APNs.
    static let foreignTries = 20

    /// A status that APNs does not use, or a 410 without what APNs sends with it. It says nothing of the message, so the
    /// request waits for another try, within the same limits as any other. An expiration of 0 allows one try only; this one
    /// does not count, because most likely APNs has not received it.
    private func foreign(_ status: Int32, _ attempt: Try) -> Step {
        let words =
            "the server answered \(status), " + (status == 410 ? "but not as APNs does" : "which APNs does not use")
        if attempt.attempts + 1 >= Self.foreignTries {
            return Step(.failed("\(words); failed after \(attempt.attempts + 1) tries"), .foreign(words))
        }
        var attempt = attempt
        if attempt.of.expiration == 0 { attempt.of.expiration = nil }
        let pause = Self.growing(.seconds(5), attempt.attempts, to: .seconds(300))
        return Step(again(after: pause, words, attempt), .foreign(words))
    }

    /// Another try, unless it would come too late.
    private func again(after pause: Duration, _ words: String, _ attempt: Try) -> RequestFate {
        let at = attempt.now.advanced(byMicroseconds: pause.microseconds)
        if let expiration = attempt.of.expiration, expiration > 0, at.microseconds / 1_000_000 >= expiration {
            return .failed("\(words); its expiration comes before another try")
        }
        if attempt.of.expiration == 0 { return .failed("\(words); its expiration allows one try only") }
        if at > attempt.firstSentAt.advanced(byMicroseconds: retryFor.microseconds) {
            return .failed("\(words); failed after \(attempt.attempts + 1) tries")
        }
        return .later(pause, words)
    }

    /// A pause that doubles with each try in vain, up to a limit.
    private static func growing(_ first: Duration, _ attempts: Int, to longest: Duration) -> Duration {
        min(first * (1 << min(max(attempts, 0), 16)), longest)
    }
}
