internal import TokenModel

/// One request and the attempts made for it so far; decides whether it is sent again. Pure.
///
/// Each attempt sends the same request with the same `apns-id`. The rules: Apple, "Handling notification responses from
/// APNs", and RFC 9113, 8.7.
struct Delivery: Sendable {
    let request: PushRequest
    private(set) var sentAt: Instant?
    private(set) var sends = 0
    /// How often the server has refused the stream of this request by REFUSED_STREAM, and not by GOAWAY.
    private var refusals = 0
    /// From the last send to its response; nil before the response.
    private(set) var responseTime: Duration?
    /// How many sends are allowed in total: two, which leaves one for a retry after a loss. One if an earlier attempt has already
    /// been made.
    private var allowed: Int
    private var isAbandoned = false
    private var hasRenewed = false
    private var hasChangedConnection = false
    /// Why the last turn failed, if the request is to be sent again.
    private var lastFailure: (kind: PushFailure.Kind, message: String)?
    /// The provider token of the last send.
    var authorization: String?

    init(_ request: PushRequest) {
        self.request = request
        allowed = request.mayBeRepeated ? 2 : 1
    }

    /// Allows no more sends, not even in place of one that does not count.
    mutating func repeatNoMore() {
        isAbandoned = true
    }

    /// Whether another send is allowed.
    var mayGo: Bool { !isAbandoned && sends < allowed }

    /// Counts a send, which happens now.
    mutating func goes(at time: Instant) {
        sends += 1
        responseTime = nil
        if sentAt == nil { sentAt = time }
    }

    /// The last send does not count: the server says that it did not process the request.
    mutating func wasRefused(byGoAway: Bool) {
        sends -= 1
        if !byGoAway { refusals += 1 }
        if sends == 0 { sentAt = nil }
    }

    /// How the request ends if the server never takes it; nil while it may go again.
    var endRefused: PushOutcome.End? {
        refusals < 5 ? nil : failed(.connectionLost, "the server has refused the stream \(refusals) times")
    }

    /// The response to the last send has arrived.
    mutating func wasAnswered(after time: Duration) {
        responseTime = time
    }

    /// How one turn ended.
    enum Turn: Equatable {
        /// With a complete response.
        case answer(PushResponse)
        /// Without a response: why, in one line, and whether the request was sent in this turn.
        case failure(PushFailure.Kind, message: String, wasSent: Bool)
    }

    enum Step: Equatable {
        case ends(PushOutcome.End)
        /// Send again at once; over another connection if this one is unfit.
        case again(connectionIsUnfit: Bool)
    }

    /// - Parameter renew: Takes the provider token that was refused. Returns whether there is another one now.
    mutating func step(after turn: Turn, renew: (String) -> Bool) -> Step {
        switch turn {
        case .answer(let answer):
            lastFailure = nil
            if answer.status == 200 { return .ends(.answered(answer)) }
            switch ResponseBody(answer.body).reason {
            // APNs may call a token of a wrong clock invalid.
            case "ExpiredProviderToken", "InvalidProviderToken":
                guard !hasRenewed, !isAbandoned, let authorization, renew(authorization) else { break }
                hasRenewed = true
                allowed = sends + 1
                return .again(connectionIsUnfit: false)
            case "UnrelatedKeyIdInToken" where !hasChangedConnection && !isAbandoned:
                hasChangedConnection = true
                allowed = sends + 1
                return .again(connectionIsUnfit: true)
            default: break
            }
            return .ends(.answered(answer))
        case .failure(let kind, let message, let wasSent):
            // If nothing was sent, the server cannot be reached, and another attempt would fail the same way.
            if wasSent, mayGo {
                lastFailure = (kind, message)
                return .again(connectionIsUnfit: false)
            }
            return .ends(failed(kind, message))
        }
    }

    func failed(_ kind: PushFailure.Kind, _ message: String, retryAfter: Duration? = nil) -> PushOutcome.End {
        .unanswered(PushFailure(kind: kind, message: message, mayHaveArrived: sends > 0, retryAfter: retryAfter))
    }

    /// How the request ends while its server is in a pause.
    ///
    /// - Parameter isAlone: Whether the server answers other requests, so that a refused stream is about this one.
    func endInPause(_ pause: Duration, host: String, isAlone: Bool = false) -> PushOutcome.End {
        if isAlone, refusals > 0 {
            return failed(.connectionLost, "the server has refused the stream", retryAfter: pause)
        }
        guard let (kind, message) = lastFailure else {
            return failed(.backingOff, "\(host) could not be reached a moment ago", retryAfter: pause)
        }
        return failed(kind, message, retryAfter: pause)
    }

    /// How the request ends when the client stops, or when it is taken back.
    var endAtStop: PushOutcome.End {
        sends == 0 ? .withdrawn : failed(.stopped, "sending was stopped before the response arrived")
    }

    /// How a request ends that came back unsent and must not go again.
    var endUnsent: PushOutcome.End {
        guard sends > 0, let (kind, message) = lastFailure else { return endAtStop }
        return failed(kind, message)
    }

    func outcome(_ end: PushOutcome.End) -> PushOutcome {
        PushOutcome(
            request: request, sentAt: sentAt, sends: sends, end: end, responseTime: responseTime,
            authorization: authorization)
    }
}
