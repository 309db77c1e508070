import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct `What becomes of a request` {
    static let day: Int64 = 86_400_000_000
    let policy = RetryPolicy(retryFor: .seconds(86_400))
    static let now = Instant(microseconds: 1_800_000_000_000_000)

    static func request(expiration: Int64? = nil) -> PushRequest {
        PushRequest(
            address: TokenAddress(
                environment: .production, topic: Topic("com.example.app")!, token: DeviceToken(hex: "ab")!),
            payload: Array("{}".utf8), pushType: .alert, expiration: expiration,
            id: "00000000-0000-4000-8000-000000000000")
    }

    private func step(
        _ end: PushOutcome.End, attempts: Int = 0, firstSentAt: Instant = now, expiration: Int64? = nil
    ) -> RetryPolicy.Step {
        policy.step(
            after: end, of: Self.request(expiration: expiration), attempts: attempts, firstSentAt: firstSentAt,
            now: Self.now)
    }

    private func answered(_ status: Int32, _ reason: String?) -> PushOutcome.End {
        .answered(
            PushResponse(
                status: status, body: reason.map { #"{"reason":"\#($0)"}"# }, apnsID: "id"))
    }

    @Test func `200, 410 and a bad token finish the request, and the latter two blame the token`() {
        #expect(step(answered(200, nil)) == .init(.answered))
        let gone = PushResponse(status: 410, body: #"{"reason":"Unregistered","timestamp":1794000000123}"#)
        #expect(step(.answered(gone)) == .init(.answered, .token))
        #expect(step(answered(400, "BadDeviceToken")) == .init(.answered, .token))
        #expect(step(answered(400, "DeviceTokenNotForTopic")) == .init(.answered, .token))
        // sideshow/apns2#220 lists it with 400, and a 410 may lack its timestamp.
        #expect(step(answered(400, "ExpiredToken")) == .init(.answered, .token))
        #expect(step(answered(410, "ExpiredToken")) == .init(.answered, .token))
    }

    @Test func `a known reason decides, whatever the status`() {
        for status: Int32 in [400, 403, 404, 413] {
            #expect(step(answered(status, "Unregistered")) == .init(.answered, .token), "\(status)")
            #expect(step(answered(status, "BadDeviceToken")) == .init(.answered, .token), "\(status)")
            #expect(step(answered(status, "ServiceUnavailable")).blame == .server, "\(status)")
            #expect(step(answered(status, "PayloadTooLarge")).blame.words?.contains("PayloadTooLarge") == true)
            let refused = step(answered(status, "InvalidProviderToken"))
            #expect(refused.blame.isRefusal)
            guard case .later = refused.fate else {
                Issue.record("\(refused)")
                continue
            }
        }
        #expect(step(answered(400, "TooManyRequests")).blame == .token)
        // An error of the server says nothing about a token.
        #expect(step(answered(500, "BadDeviceToken")).blame == .server)
    }

    @Test func `while the server responds to nothing, an interrupted request waits longer`() {
        let lost = PushOutcome.End.unanswered(PushFailure(kind: .connectionLost, message: "lost", mayHaveArrived: true))
        func pause(isSilent: Bool, expiration: Int64? = nil) -> Duration? {
            let step = policy.step(
                after: lost, of: Self.request(expiration: expiration), attempts: 0, firstSentAt: Self.now,
                now: Self.now,
                isSilent: isSilent)
            if case .interrupted(let pause, _) = step.fate { return pause }
            return nil
        }
        #expect(pause(isSilent: false).map { $0 <= .seconds(5) } == true)
        #expect(pause(isSilent: true) == .seconds(300))
        #expect(pause(isSilent: true, expiration: Self.now.microseconds / 1_000_000 + 30) == .seconds(15))
    }

    @Test(arguments: [(400, "BadTopic"), (400, "MissingTopic"), (400, "TopicDisallowed"), (403, "Forbidden")])
    func `an error that may be of the topic is retried, and is evidence against the topic`(
        status: Int32, reason: String
    ) {
        let words = "APNs answered \(status) \(reason)"
        #expect(step(answered(status, reason)) == .init(.later(.seconds(5), words), .topic(words)))
    }

    @Test(arguments: [
        (400, "MissingDeviceToken"), (400, "DuplicateHeaders"), (403, "BadCertificate"),
        (403, "BadCertificateEnvironment"), (403, "ExpiredProviderToken"), (403, "InvalidProviderToken"),
        (403, "MissingProviderToken"), (403, "BadEnvironmentKeyIdInToken"), (403, "UnheardOf"), (404, "BadPath"),
        (405, "MethodNotAllowed"), (429, "TooManyProviderTokenUpdates"),
    ])
    func `an error that may be of the credential is retried, and is evidence against it`(status: Int32, reason: String)
    {
        let words = "APNs answered \(status) \(reason)"
        #expect(step(answered(status, reason)) == .init(.later(.seconds(5), words), .sender(words)))
        #expect(step(answered(status, reason), attempts: 3).fate == .later(.seconds(40), words))
        #expect(step(answered(status, reason), attempts: 18).fate == .later(.seconds(300), words))
        #expect(
            step(answered(status, reason), attempts: 18, expiration: 1_800_000_020).fate == .later(.seconds(10), words),
            "within the expiration")
        #expect(
            step(answered(status, reason), firstSentAt: .distantPast, expiration: 0).fate
                == .later(.seconds(5), words), "nothing fails by itself")
    }

    @Test(arguments: [
        (400, "BadCollapseId"), (400, "BadExpirationDate"), (400, "BadMessageId"), (400, "BadPriority"),
        (400, "InvalidPushType"),
        (400, "PayloadEmpty"), (413, "PayloadTooLarge"), (400, "SomethingNew"), (413, "SomethingNew"),
    ])
    func `an error in one message fails that message`(status: Int32, reason: String) {
        let words = "APNs answered \(status) \(reason)"
        #expect(step(answered(status, reason)) == .init(.failed(words), .message(words)))
    }

    @Test(
        arguments: [
            (100, #"{"reason":"BadPriority"}"#), (202, nil), (204, nil), (301, nil), (308, ""),
            (401, "<html>Sign in</html>"),
            (407, nil), (418, nil), (421, nil), (502, "<html>Bad gateway</html>"), (504, nil), (600, nil),
            (999, #"{"reason":"BadPriority"}"#), (200, "Welcome to nginx!"), (200, nil), (400, "<html>"), (400, nil),
            (403, "<html>Forbidden</html>"), (404, nil), (413, "<html>Too large</html>"), (429, "slow down"),
            (400, #"{"reason":"Request blocked"}"#), (404, #"{"reason":"NotFound","kind":"Status"}"#),
            (
                404,
                #"{"reason":"no route for /3/device/00fc13adff785122b4ad28809a3420982341241421348097878e577c991de8f0"}"#
            ),
            (503, "no healthy upstream"), (410, nil), (410, "<html>Gone</html>"),
            (410, #"{"timestamp":1794000000123}"#),
            (410, "Unregistered"), (400, "BadDeviceToken"), (500, "{}"),
        ] as [(Int32, String?)])
    func `a response that APNs does not send says nothing about the request, which is retried`(
        status: Int32, body: String?
    ) {
        let end = PushOutcome.End.answered(PushResponse(status: status, body: body))
        let words = "the server answered \(status), but not as APNs does"
        func waits(_ pause: Duration) -> RequestFate {
            // A relay may have passed it on.
            status == 200 ? .interrupted(pause, words) : .later(pause, words)
        }
        #expect(step(end) == .init(waits(.seconds(5)), .foreign(words)))
        #expect(step(end, attempts: 18, firstSentAt: .distantPast).fate == waits(.seconds(300)))
        #expect(step(end, expiration: 0).fate == waits(.seconds(5)), "APNs has had no try")
    }

    @Test func `a request whose stream was always refused is tried again, also if it allows one delivery only`() {
        let refused = PushFailure(kind: .connectionLost, message: "refused", mayHaveArrived: false)
        #expect(step(.unanswered(refused), expiration: 0) == .init(.later(.seconds(5), "refused"), .server))
        let lost = PushFailure(kind: .connectionLost, message: "lost", mayHaveArrived: true)
        #expect(
            step(.unanswered(lost), expiration: 0).fate == .failed("lost; its expiration allows one try only"))
    }

    @Test func `retries back off exponentially`() {
        #expect(
            step(answered(400, "IdleTimeout")) == .init(.later(.seconds(1), "APNs answered 400 IdleTimeout"), .server))
        let quarter = Duration.seconds(900)
        for (attempts, pause) in [
            (0, .seconds(1)), (1, quarter), (2, quarter * 2), (3, quarter * 4), (4, quarter * 4),
            (1000, quarter * 4),
        ] {
            #expect(
                step(answered(503, "Shutdown"), attempts: attempts).fate == .later(pause, "APNs answered 503 Shutdown"))
        }
        #expect(step(answered(500, "InternalServerError")).blame == .server)
        #expect(
            step(answered(429, "TooManyRequests"))
                == .init(.later(.seconds(60), "APNs answered 429 TooManyRequests"), .token))
        #expect(
            step(answered(429, "TooManyRequests"), attempts: 20).fate
                == .later(.seconds(3600), "APNs answered 429 TooManyRequests"))
        let unreachable = PushFailure(kind: .connect, message: "nobody there", mayHaveArrived: false)
        #expect(step(.unanswered(unreachable)) == .init(.later(.seconds(5), "nobody there"), .unreachable))
        #expect(step(.unanswered(unreachable), attempts: 9).fate == .later(.seconds(15), "nobody there"))
        // A proxy that speaks HTTP/1.1 only is in the way for a while, too.
        let old = PushFailure(kind: .protocolError, message: "no HTTP/2", mayHaveArrived: false)
        #expect(step(.unanswered(old), attempts: 9) == .init(.later(.seconds(15), "no HTTP/2"), .unreachable))
    }

    @Test func `a request that may have been delivered without a response is interrupted, not retried for a day`() {
        let lost = PushFailure(kind: .connectionLost, message: "gone", mayHaveArrived: true)
        #expect(step(.unanswered(lost)) == .init(.interrupted(.seconds(5), "gone"), .server))
        #expect(step(.unanswered(lost), expiration: 0).fate == .failed("gone; its expiration allows one try only"))
        let stopped = PushFailure(kind: .stopped, message: "stopped", mayHaveArrived: true)
        #expect(step(.unanswered(stopped)) == .init(.interrupted(.zero, "stopped")))
        #expect(
            step(.unanswered(stopped), expiration: 0).fate == .failed("stopped; its expiration allows one try only"))
    }

    @Test func `retries end`() {
        let dayAgo = Self.now.advanced(byMicroseconds: -Self.day)
        let almost = Self.now.advanced(byMicroseconds: -Self.day + 900_000_000)
        #expect(
            step(answered(503, "Shutdown"), attempts: 1, firstSentAt: almost).fate
                == .later(.seconds(900), "APNs answered 503 Shutdown"))
        #expect(
            step(answered(503, "Shutdown"), attempts: 6, firstSentAt: dayAgo).fate
                == .failed("APNs answered 503 Shutdown; failed after 7 tries"))
        #expect(
            step(answered(503, "Shutdown"), expiration: 0).fate == .later(.seconds(1), "APNs answered 503 Shutdown"),
            "APNs has not delivered it")
        #expect(
            step(answered(503, "Shutdown"), attempts: 1, expiration: 0).fate
                == .failed("APNs answered 503 Shutdown; its expiration allows one try only"))
    }

    @Test func `a push that lives for five minutes is retried within them`() {
        let end = answered(500, "InternalServerError")
        let expiration: Int64 = 1_800_000_300
        var now = Self.now
        var pauses: [Double] = []
        for attempts in 0...20 {
            let step = policy.step(
                after: end, of: Self.request(expiration: expiration), attempts: attempts, firstSentAt: Self.now,
                now: now)
            guard case .later(let pause, _) = step.fate else {
                #expect(
                    step.fate
                        == .failed("APNs answered 500 InternalServerError; its expiration comes before another try"))
                break
            }
            pauses.append(Double(pause.microseconds) / 1_000_000)
            now = now.advanced(byMicroseconds: pause.microseconds)
        }
        #expect(pauses.count == 9 && pauses[0] == 1 && pauses[1] == 149.5 && pauses[2] == 74.75, "\(pauses)")
        #expect(now.microseconds < expiration * 1_000_000)
    }

    @Test func `a request that was not sent goes back unchanged`() {
        #expect(step(.withdrawn) == .init(.returned(nil)))
        #expect(
            step(
                .unanswered(
                    PushFailure(kind: .backingOff, message: "m", mayHaveArrived: false, retryAfter: .seconds(7))))
                == .init(.returned(.seconds(7)), .unreachable))
        #expect(
            step(.unanswered(PushFailure(kind: .identity, message: "no key", mayHaveArrived: false)))
                == .init(.later(.seconds(5), "no key"), .sender("no key")))
        #expect(
            step(.unanswered(PushFailure(kind: .stopped, message: "m", mayHaveArrived: false))) == .init(.returned(nil))
        )
        #expect(step(.unsendable("too long")) == .init(.failed("too long")))
    }
}
