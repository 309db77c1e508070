public import TokenModel

/// Decides what becomes of a request after each outcome, and of the requests behind it. Pure.
///
/// Which responses are worth a retry, and when: Apple, "Handling notification responses from APNs".
public struct RetryPolicy: Sendable, Equatable {
    /// How long a request is retried after it was first sent.
    public var retryFor: Duration

    public init(retryFor: Duration) {
        self.retryFor = retryFor
    }

    /// What follows from one outcome.
    public struct Step: Sendable, Equatable {
        public var fate: RequestFate
        public var blame: Blame

        public init(_ fate: RequestFate, _ blame: Blame = .nobody) {
            self.fate = fate
            self.blame = blame
        }
    }

    /// What the outcome blames, apart from the request.
    public enum Blame: Sendable, Equatable {
        case nobody
        /// The device token. Its other requests wait until the ledger has recorded the response, or as long as this request.
        case token
        /// This message. Many in a row mean that the program that writes them is at fault.
        case message(String)
        /// The topic's configuration or credential: every waiting request would get the same response.
        case topic(String)
        /// APNs does not send such a response: something between the daemon and APNs did. A few in a row pause the topic.
        case foreign(String)
        /// The server returns errors or cannot be reached. After many in a row, it rests.
        case server
        /// APNs requests a pause of this length for the credential.
        case credential(Duration)
    }

    private static let unreachable = Backoff(from: .seconds(5), to: .seconds(300))
    private static let tooManyRequests = Backoff(from: .seconds(60), to: .seconds(3600))
    private static let serverError = Backoff(from: .seconds(15 * 60), to: .seconds(4 * 3600))
    private static let foreignResponse = Backoff(from: .seconds(5), to: .seconds(300))
    /// APNs accepts a new provider token every 20 minutes.
    private static let tokenUpdates: Duration = .seconds(20 * 60)

    /// - Parameters:
    ///   - attempts: How often the request has failed before.
    ///   - firstSentAt: When the request was first tried.
    ///   - now: The time of day, by about the same clock as `firstSentAt`.
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
            return step(after: failure, Try(of: request, attempts: attempts, firstSentAt: firstSentAt, now: now))
        }
    }

    private func step(after failure: PushFailure, _ attempt: Try) -> Step {
        switch failure.kind {
        case .backingOff: return Step(.returned(failure.retryAfter ?? .seconds(1)), .server)
        case .stopped where !failure.mayHaveArrived: return Step(.returned(nil))
        case .identity: return Step(.returned(nil), .topic(failure.message))
        default: break
        }
        let wasStopped = failure.kind == .stopped
        let pause = wasStopped ? .zero : Self.unreachable.pause(after: attempt.attempts)
        let blame = wasStopped ? Blame.nobody : .server
        let fate = again(after: pause, failure.message, attempt)
        // A server that accepts requests but never responds must not cause repeated deliveries.
        if failure.mayHaveArrived, case .later(let pause, let words) = fate {
            return Step(.interrupted(pause, words), blame)
        }
        return Step(fate, blame)
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
            return Step(again(after: Self.tokenUpdates, words, attempt), .credential(Self.tokenUpdates))
        case (429, _):
            return Step(again(after: Self.tooManyRequests.pause(after: attempt.attempts), words, attempt), .token)
        case (500...599, _):
            return Step(again(after: Self.serverError.pause(after: attempt.attempts), words, attempt), .server)
        case (400, "BadTopic"), (400, "MissingTopic"), (400, "TopicDisallowed"), (400, "MissingDeviceToken"),
            (400, "DuplicateHeaders"), (403, _), (404, _), (405, _):
            return Step(.returned(nil), .topic(words))
        // PayloadTooLarge, BadPriority and others, including new reasons, which Apple adds without notice.
        case (400, _), (413, _): return Step(.failed(words), .message(words))
        default: return foreign(answer.status, attempt)
        }
    }

    /// The most tries of a request whose responses are not from APNs.
    static let foreignTries = 20

    /// A status that APNs does not use, or a 410 without what APNs sends with it. It says nothing about the message, so the
    /// request is retried within the usual limits. An expiration of 0 allows one try; this one does not count, because most
    /// likely APNs has not received it.
    private func foreign(_ status: Int32, _ attempt: Try) -> Step {
        let words =
            "the server answered \(status), " + (status == 410 ? "but not as APNs does" : "which APNs does not use")
        if attempt.attempts + 1 >= Self.foreignTries {
            return Step(.failed("\(words); failed after \(attempt.attempts + 1) tries"), .foreign(words))
        }
        var attempt = attempt
        if attempt.of.expiration == 0 { attempt.of.expiration = nil }
        return Step(
            again(after: Self.foreignResponse.pause(after: attempt.attempts), words, attempt), .foreign(words))
    }

    /// A retry, unless it would come too late.
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
}
