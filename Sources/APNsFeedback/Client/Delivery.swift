internal import TokenModel

/// One request and the attempts made for it so far; decides whether it is sent again. Pure.
///
/// Each attempt sends the same request with the same `apns-id`. The rules: Apple, "Handling notification responses from
/// APNs", and RFC 9113, 8.7.
struct Delivery: Sendable {
    let request: PushRequest
    private(set) var sentAt: Instant?
    private(set) var sends = 0
    /// How many sends are allowed in total: two, which leaves one for a retry after a loss, by libcurl or by this client. One if an
    /// earlier attempt has already been made.
    private var allowed: Int
    private var hasRenewed = false
    private var hasChangedConnection = false
    /// How the last turn failed, if it did and another one follows.
    private var lastFailure: (kind: PushFailure.Kind, message: String)?
    /// The provider token of the last send.
    var authorization: String?

    init(_ request: PushRequest) {
        self.request = request
        allowed = request.mayBeRepeated ? 2 : 1
    }

    /// Allows no more sends.
    mutating func repeatNoMore() {
        allowed = sends
    }

    /// Counts a send, which happens now.
    ///
    /// - Returns: False if no more sends are allowed.
    mutating func goes(at time: @autoclosure () -> Instant) -> Bool {
        guard sends < allowed else { return false }
        sends += 1
        if sentAt == nil { sentAt = time() }
        return true
    }

    /// How one turn ended.
    enum Turn: Equatable {
        /// With a response. The end of a torn one may be missing.
        case answer(PushResponse, isTorn: Bool)
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
        case .answer(let answer, let isTorn):
            lastFailure = nil
            if isTorn, sends < allowed { return .again(connectionIsUnfit: false) }
            if isTorn, answer.body != nil {
                return .ends(failed(.connectionLost, "the end of the response is missing"))
            }
            guard answer.status == 403 else { return .ends(.answered(answer)) }
            switch ResponseBody(answer.body).reason {
            case "ExpiredProviderToken":
                guard !hasRenewed, let authorization, renew(authorization) else { break }
                hasRenewed = true
                allowed = sends + 1
                return .again(connectionIsUnfit: false)
            case "UnrelatedKeyIdInToken" where !hasChangedConnection:
                hasChangedConnection = true
                allowed = sends + 1
                return .again(connectionIsUnfit: true)
            default: break
            }
            return .ends(.answered(answer))
        case .failure(let kind, let message, let wasSent):
            // If nothing was sent, the server cannot be reached, and another attempt would fail the same way.
            if wasSent, sends < allowed {
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
    func endInPause(_ pause: Duration, host: String) -> PushOutcome.End {
        guard let (kind, message) = lastFailure else {
            return failed(.backingOff, "\(host) could not be reached a moment ago", retryAfter: pause)
        }
        return failed(kind, message, retryAfter: pause)
    }

    /// How the request ends when the client stops.
    var endAtStop: PushOutcome.End {
        sends == 0 ? .withdrawn : failed(.stopped, "the client was stopped before the response arrived")
    }

    func outcome(_ end: PushOutcome.End) -> PushOutcome {
        PushOutcome(request: request, sentAt: sentAt, sends: sends, end: end)
    }
}
