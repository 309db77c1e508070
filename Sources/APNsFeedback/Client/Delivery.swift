internal import TokenModel

/// One request on its way, with what has been tried for it; decides whether it is tried again.
///
/// It is always the same request with the same `apns-id`. Source of the rules: Apple, "Handling notification responses from
/// APNs", and RFC 9113, 8.7.
struct Delivery: Sendable {
    let request: PushRequest
    private(set) var sentAt: Instant?
    private(set) var sends = 0
    /// How often it may go to a connection altogether: twice, for one repetition after a loss, whether by libcurl or by us; once if it has
    /// been tried before.
    private var allowed: Int
    private var hasRenewed = false
    private var hasChangedConnection = false
    /// How the last turn failed, if it did and there is to be another.
    private var lastFailure: (kind: PushFailure.Kind, message: String)?
    /// The provider token of the last sending.
    var authorization: String?

    init(_ request: PushRequest) {
        self.request = request
        allowed = request.mayBeRepeated ? 2 : 1
    }

    /// It is not to go to a connection again.
    mutating func repeatNoMore() {
        allowed = sends
    }

    /// Takes note that it goes to a connection now.
    ///
    /// - Returns: False when it must not, because it did often enough.
    mutating func goes(at time: @autoclosure () -> Instant) -> Bool {
        guard sends < allowed else { return false }
        sends += 1
        if sentAt == nil { sentAt = time() }
        return true
    }

    /// How one turn ended.
    enum Turn: Equatable {
        /// With an answer; a torn one may lack its end.
        case answer(PushResponse, isTorn: Bool)
        /// With none: why, in a line, and whether it went to a connection in this turn.
        case failure(PushFailure.Kind, message: String, wasSent: Bool)
    }

    enum Step: Equatable {
        case ends(PushOutcome.End)
        /// Once more, at once; over another connection, if this one is said to be unfit.
        case again(connectionIsUnfit: Bool)
    }

    /// - Parameter renew: Told the provider token that was refused; answers whether there is another one now.
    mutating func step(after turn: Turn, renew: (String) -> Bool) -> Step {
        switch turn {
        case .answer(let answer, let isTorn):
            lastFailure = nil
            if isTorn, sends < allowed { return .again(connectionIsUnfit: false) }
            if isTorn, answer.body != nil { return .ends(failed(.connectionLost, "the end of the answer is missing")) }
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
            // Where nothing was sent, the server is not to be had, and the next attempt would fail just as well.
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

    /// How it ends while its server is left in peace.
    func endInPause(_ pause: Duration, host: String) -> PushOutcome.End {
        guard let (kind, message) = lastFailure else {
            return failed(.backingOff, "\(host) could not be reached a moment ago", retryAfter: pause)
        }
        return failed(kind, message, retryAfter: pause)
    }

    /// How it ends when the client stops.
    var endAtStop: PushOutcome.End {
        sends == 0 ? .withdrawn : failed(.stopped, "the client was stopped before the answer came")
    }

    func outcome(_ end: PushOutcome.End) -> PushOutcome {
        PushOutcome(request: request, sentAt: sentAt, sends: sends, end: end)
    }
}
