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

    /// What the outcome may be about, apart from the request. One outcome is evidence about its request only: see `Evidence`.
    public enum Blame: Sendable, Hashable {
        case nobody
        /// The device token. Its other requests wait until the ledger has recorded the response, or as long as this request.
        case token
        /// This message. Many in a row mean that the program that writes them is at fault.
        case message(String)
        /// The topic, or what this credential may do with it.
        case topic(String)
        /// The credential, or this host: its clock, its configuration.
        case sender(String)
        /// APNs does not send such a response: something between the daemon and APNs did.
        case foreign(String)
        /// The server returns errors, or loses requests.
        case server
        /// No connection to the server can be made.
        case unreachable
    }

    /// How much it takes until something wider than a request pauses: so many different tokens whose requests drew such an outcome, while no request of
    /// the same topic or credential was accepted. If one was accepted within `acceptedWithin`, the row must also have lasted for two seconds: hundreds of requests
    /// are in flight at once, so twenty responses of one topic may come within a millisecond. Then how long it pauses: longer each time, until a request is
    /// accepted.
    ///
    /// The numbers are ours (docs/decisions/sending.md): five tokens cannot be one person's mistake, and APNs refuses single requests for minutes while it accepts
    /// others (apnotic#109, dotAPNS#128). Errors of a server and of messages come in bursts, so they need more. A server that cannot be reached is tried every
    /// 15 seconds, because nothing else shows that it is back, and so is a topic, because requests of other programs may be good.
    public struct Evidence: Sendable, Equatable {
        public var tokens: Int
        /// Of a server.
        public var pause: Backoff

        public static let pauseOfTopic = Backoff(from: .seconds(5), to: .seconds(15))
        public static let lasts: Duration = .seconds(2)

        /// Nil for what pauses nothing.
        public init?(_ blame: Blame) {
            let usual = Backoff(from: .seconds(5), to: .seconds(300))
            switch blame {
            case .nobody, .token: return nil
            case .topic, .sender, .foreign: (tokens, pause) = (5, usual)
            case .server: (tokens, pause) = (20, usual)
            case .message, .unreachable: (tokens, pause) = (20, Backoff(from: .seconds(5), to: .seconds(15)))
            }
        }
    }

    /// A request fails alone after so many refusals that count against it: see `isRefusal`.
    public static let refusals = 5

    /// A refusal counts against its request if another request of its topic was accepted within this time before it.
    public static let acceptedWithin: Duration = .seconds(600)

    private static let refused = Backoff(from: .seconds(5), to: .seconds(300))
    private static let unreachable = Backoff(from: .seconds(5), to: .seconds(15))
    private static let noResponse = Backoff(from: .seconds(5), to: .seconds(300))
    /// An interrupted request has one more send. While its server responds to nothing, this send would be lost, too; other requests show when it is back.
    private static let silent: Duration = .seconds(300)
    private static let idleTimeout = Backoff(from: .seconds(1), to: .seconds(60))
    public static let tooManyRequests = Backoff(from: .seconds(60), to: .seconds(3600))
    /// Apple: a quarter of an hour, then longer. An hour at most: after an outage, the tries that reached nobody count, too. Before that, once at once: libraries found that another connection often helps (pushy#408).
    private static let serverError = (
        once: Duration.seconds(1), then: Backoff(from: .seconds(15 * 60), to: .seconds(3600))
    )

    /// - Parameters:
    ///   - attempts: How often the request has failed before.
    ///   - firstSentAt: When the request was first tried.
    ///   - now: The time of day, by about the same clock as `firstSentAt`.
    ///   - isSilent: Whether the server has responded to nothing since the request was sent.
    public func step(
        after end: PushOutcome.End, of request: PushRequest, attempts: Int, firstSentAt: Instant, now: Instant,
        isSilent: Bool = false
    ) -> Step {
        switch end {
        case .withdrawn: return Step(.returned(nil))
        case .unsendable(let fault): return Step(.failed(fault))
        case .answered(let answer):
            return step(
                after: answer, Try(of: request, attempts: attempts, firstSentAt: firstSentAt, now: now))
        case .unanswered(let failure):
            let attempt = Try(
                of: request, attempts: attempts, firstSentAt: firstSentAt, now: now, isSilent: isSilent)
            return step(after: failure, attempt)
        }
    }

    private func step(after failure: PushFailure, _ attempt: Try) -> Step {
        switch failure.kind {
        case .backingOff: return Step(.returned(failure.retryAfter ?? .seconds(1)), .unreachable)
        case .stopped where !failure.mayHaveArrived: return Step(.returned(nil))
        case .identity: return refusal(.sender(failure.message), failure.message, attempt)
        default: break
        }
        // A proxy in place of the server may speak HTTP/1.1 only.
        let cannotConnect =
            [.nameResolution, .connect, .tls].contains(failure.kind)
            || failure.kind == .protocolError && !failure.mayHaveArrived
        let wasStopped = failure.kind == .stopped
        let backoff = cannotConnect ? Self.unreachable : Self.noResponse
        let isInVain = failure.mayHaveArrived && attempt.isSilent
        let pause =
            wasStopped ? .zero : isInVain ? Self.silent : backoff.pause(after: attempt.attempts)
        let blame = wasStopped ? Blame.nobody : cannotConnect ? .unreachable : .server
        // An expiration of 0 allows one delivery. A server that has refused the stream has made none. Once: later, it would come too late.
        var attempt = attempt
        if failure.kind == .connectionLost, !failure.mayHaveArrived, attempt.attempts == 0, attempt.of.expiration == 0 {
            attempt.of.expiration = nil
        }
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
        var isSilent = false
    }

    private func step(after answer: PushResponse, _ attempt: Try) -> Step {
        let body = ResponseBody(answer.body)
        guard Interpretation.isOfAPNs(answer) else {
            let words = Interpretation.words(ofForeign: answer.status)
            let step = refusal(.foreign(words), words, attempt)
            // A relay may have passed it on.
            guard answer.status == 200, case .later(let pause, _) = step.fate else { return step }
            return Step(.interrupted(pause, words), step.blame)
        }
        let words = "APNs answered \(answer.status) \(body.reason ?? Verdict.noReason)"
        if answer.status == 200 { return Step(.answered) }
        if answer.status == 410 { return Step(.answered, .token) }
        switch Reason(status: answer.status, body.reason) {
        case .token: return Step(.answered, .token)
        case .tooManyOfToken:
            return Step(again(after: Self.tooManyRequests.pause(after: attempt.attempts), words, attempt), .token)
        case .idle: return Step(again(after: Self.idleTimeout.pause(after: attempt.attempts), words, attempt), .server)
        case .server: return Step(afterServerError(words, attempt), .server)
        case .topic, .permission: return refusal(.topic(words), words, attempt)
        case .credential, .sender: return refusal(.sender(words), words, attempt)
        // PayloadTooLarge, BadPriority and others, including new reasons, which Apple adds without notice.
        case .message: return Step(.failed(words), .message(words))
        }
    }

    /// How long a request waits after a refusal that counts against it.
    ///
    /// - Parameter refusals: How many count against it already.
    public static func pause(afterRefusals refusals: Int) -> Duration { refused.pause(after: refusals) }

    /// A response that says nothing about the message. The request waits. Whether it counts against the request is for the caller to say.
    private func refusal(_ blame: Blame, _ words: String, _ attempt: Try) -> Step {
        Step(.later(bounded(Self.refused.pause(after: attempt.attempts), attempt) ?? .seconds(1), words), blame)
    }

    private func afterServerError(_ words: String, _ attempt: Try) -> RequestFate {
        guard attempt.attempts == 0 else {
            return again(after: Self.serverError.then.pause(after: attempt.attempts - 1), words, attempt)
        }
        // An expiration of 0 allows one delivery. APNs has made none.
        var attempt = attempt
        if attempt.of.expiration == 0 { attempt.of.expiration = nil }
        return again(after: Self.serverError.once, words, attempt)
    }

    /// The pause, or half of the time that the expiration leaves. Nil if it leaves less than two seconds.
    private func bounded(_ pause: Duration, _ attempt: Try) -> Duration? {
        guard let expiration = attempt.of.expiration, expiration > 0 else { return pause }
        let left = Duration.microseconds(
            expiration.multipliedReportingOverflow(by: 1_000_000).partialValue &- attempt.now.microseconds)
        return left < .seconds(2) ? nil : min(pause, left / 2)
    }

    /// A retry, unless it would come too late.
    private func again(after pause: Duration, _ words: String, _ attempt: Try) -> RequestFate {
        if attempt.of.expiration == 0 { return .failed("\(words); its expiration allows one try only") }
        guard let pause = bounded(pause, attempt) else {
            return .failed("\(words); its expiration comes before another try")
        }
        let at = attempt.now.advanced(byMicroseconds: pause.microseconds)
        if at > attempt.firstSentAt.advanced(byMicroseconds: retryFor.microseconds) {
            return .failed("\(words); failed after \(attempt.attempts + 1) tries")
        }
        return .later(pause, words)
    }
}

extension RetryPolicy.Blame {
    /// The outcome in words, if the blame has some.
    public var words: String? {
        switch self {
        case .message(let words), .topic(let words), .sender(let words), .foreign(let words): words
        case .nobody, .token, .server, .unreachable: nil
        }
    }

    /// Whether the request was refused for a reason that is not its own, as far as anybody knows: `RetryPolicy.refusals`.
    public var isRefusal: Bool {
        switch self {
        case .topic, .sender, .foreign: true
        case .nobody, .token, .message, .server, .unreachable: false
        }
    }
}
