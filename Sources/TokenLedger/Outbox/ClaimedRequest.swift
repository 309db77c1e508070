public import TokenModel

/// A request in `tokenkeeper.send_request` or of a campaign's batch that this daemon has claimed.
public struct ClaimedRequest: Hashable, Sendable {
    /// Its `request_id`; negative for a request of a campaign's batch: see `CampaignRequest`.
    public var number: Int64
    public var request: PushRequest
    /// How many attempts have failed before: APNs asked for a retry, or did not respond.
    public var attempts: Int
    /// When a daemon first claimed it, by the database server's clock.
    public var firstSentAt: Instant
    /// How often APNs refused it while it accepted others of the topic.
    public var refusals: Int
    /// Whether any daemon's request of the topic was accepted lately. Known only after a refusal.
    public var othersAccepted: Bool
    /// When the rate of its topic or campaign lets it be sent; nil without a rate.
    public var sendAt: ContinuousClock.Instant?

    public init(
        number: Int64, request: PushRequest, attempts: Int = 0, firstSentAt: Instant, refusals: Int = 0,
        othersAccepted: Bool = false, sendAt: ContinuousClock.Instant? = nil
    ) {
        self.number = number
        self.request = request
        self.attempts = attempts
        self.firstSentAt = firstSentAt
        self.refusals = refusals
        self.othersAccepted = othersAccepted
        self.sendAt = sendAt
    }
}

/// What became of a request that this daemon had claimed.
public struct RequestEnding: Hashable, Sendable {
    /// What APNs answered, for `send_result`.
    public struct Answer: Hashable, Sendable {
        public var status: Int32
        /// Verbatim.
        public var body: String?
        public var apnsID: String?
        /// What it says about the token, for the campaign's counts.
        public var meaning: Meaning

        public init(status: Int32, body: String? = nil, apnsID: String? = nil, meaning: Meaning = .accepted) {
            self.status = status
            self.body = body
            self.apnsID = apnsID
            self.meaning = meaning
        }
    }

    /// How a campaign's request ends that APNs has answered for good. The words are those of `campaign_progress`.
    public enum Meaning: String, Sendable {
        case accepted, stale, suspect
    }

    /// The number of its `ClaimedRequest`.
    public var number: Int64
    public var fate: RequestFate
    /// Nil if APNs did not respond.
    public var answer: Answer?
    /// When the request was started.
    public var sentAt: Instant?

    public init(number: Int64, fate: RequestFate, answer: Answer? = nil, sentAt: Instant? = nil) {
        self.number = number
        self.fate = fate
        self.answer = answer
        self.sentAt = sentAt
    }
}

/// A text that a database of any encoding can store: everything except printable ASCII becomes a question mark.
func inPlainASCII(_ text: String) -> String {
    String(decoding: text.utf8.map { 0x20...0x7e ~= $0 ? $0 : UInt8(ascii: "?") }, as: UTF8.self)
}

extension RequestEnding {
    /// The same in plain ASCII.
    var inASCII: RequestEnding {
        var ending = self
        ending.answer?.body = answer?.body.map(inPlainASCII)
        ending.answer?.apnsID = answer?.apnsID.map(inPlainASCII)
        switch fate {
        case .failed(let error): ending.fate = .failed(inPlainASCII(error))
        case .later(let pause, let error): ending.fate = .later(pause, inPlainASCII(error))
        case .refused(let pause, let error): ending.fate = .refused(pause, inPlainASCII(error))
        case .interrupted(let pause, let error): ending.fate = .interrupted(pause, inPlainASCII(error))
        case .answered, .returned: break
        }
        return ending
    }
}

extension RequestFate {
    /// The name of this fate in `finish_requests`.
    var word: String {
        switch self {
        case .answered: "answered"
        case .failed: "failed"
        case .later: "later"
        case .refused: "refused"
        case .interrupted: "interrupted"
        case .returned: "returned"
        }
    }

    var pause: Duration? {
        switch self {
        case .answered, .failed: nil
        case .later(let pause, _), .refused(let pause, _), .interrupted(let pause, _): pause
        case .returned(let pause): pause
        }
    }
}
