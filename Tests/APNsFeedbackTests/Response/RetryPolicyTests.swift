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
        .answered(PushResponse(status: status, body: reason.map { #"{"reason":"\#($0)"}"# }))
    }

    @Test func `200, 410 and a bad token finish the request, and the latter two blame the token`() {
        #expect(step(answered(200, nil)) == .init(.answered))
        let gone = PushResponse(status: 410, body: #"{"reason":"Unregistered","timestamp":1794000000123}"#)
        #expect(step(.answered(gone)) == .init(.answered, .token))
        #expect(step(answered(400, "BadDeviceToken")) == .init(.answered, .token))
        #expect(step(answered(400, "DeviceTokenNotForTopic")) == .init(.answered, .token))
    }

    @Test(arguments: [
        (400, "BadTopic"), (400, "MissingTopic"), (400, "TopicDisallowed"), (400, "MissingDeviceToken"),
        (400, "DuplicateHeaders"),
        (403, "BadCertificate"), (403, "BadCertificateEnvironment"), (403, "ExpiredProviderToken"), (403, "Forbidden"),
        (403, "InvalidProviderToken"), (403, "MissingProviderToken"), (403, "BadEnvironmentKeyIdInToken"),
        (403, "UnheardOf"),
        (404, "BadPath"), (405, "MethodNotAllowed"),
    ])
    func `an error of a whole topic blames the topic and loses no request`(status: Int32, reason: String) {
        #expect(step(answered(status, reason)) == .init(.returned(nil), .topic("APNs answered \(status) \(reason)")))
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

    @Test(arguments: [100, 202, 204, 301, 308, 401, 402, 406, 407, 418, 421, 426, 451, 600, 999] as [Int32])
    func `a status that APNs does not use says nothing about the message, which is retried`(status: Int32) {
        let words = "the server answered \(status), which APNs does not use"
        #expect(step(answered(status, "BadPriority")) == .init(.later(.seconds(5), words), .foreign(words)))
        #expect(step(answered(status, nil), attempts: 3).fate == .later(.seconds(40), words))
        #expect(step(answered(status, nil), attempts: 18).fate == .later(.seconds(300), words))
        #expect(step(answered(status, nil), attempts: 19).fate == .failed("\(words); failed after 20 tries"))
        #expect(
            step(answered(status, nil), expiration: 0).fate == .later(.seconds(5), words), "one try that APNs has had")
    }

    @Test(arguments: [308, 410] as [Int32])
    func `a response that is not from APNs extends neither the expiration nor the retry time`(status: Int32) {
        let end = answered(status, nil)
        let words =
            "the server answered \(status), " + (status == 410 ? "but not as APNs does" : "which APNs does not use")
        let almost = Self.now.advanced(byMicroseconds: -Self.day + 5_000_000)
        let tooLate = almost.advanced(byMicroseconds: -1)
        #expect(step(end, expiration: 1_800_000_006).fate == .later(.seconds(5), words))
        #expect(
            step(end, expiration: 1_800_000_005)
                == .init(.failed("\(words); its expiration comes before another try"), .foreign(words)))
        #expect(
            step(end, attempts: 1, expiration: 1_800_000_009).fate
                == .failed("\(words); its expiration comes before another try"))
        #expect(step(end, firstSentAt: almost).fate == .later(.seconds(5), words))
        #expect(step(end, firstSentAt: tooLate) == .init(.failed("\(words); failed after 1 tries"), .foreign(words)))
        #expect(
            step(end, attempts: 1, firstSentAt: tooLate, expiration: 0).fate
                == .failed("\(words); failed after 2 tries"))
    }

    @Test(arguments: [
        nil, "", "<html>", #"{"reason":"Unregistered"}"#, #"{"timestamp":1794000000123}"#, "Unregistered",
    ])
    func `a 410 that APNs does not send finishes no request`(body: String?) {
        let words = "the server answered 410, but not as APNs does"
        #expect(
            step(.answered(PushResponse(status: 410, body: body))) == .init(.later(.seconds(5), words), .foreign(words))
        )
    }

    @Test func `a bare reason counts as that reason`() {
        #expect(step(.answered(PushResponse(status: 400, body: "BadDeviceToken"))) == .init(.answered, .token))
    }

    @Test func `retries back off exponentially`() {
        #expect(step(answered(400, "IdleTimeout")) == .init(.later(.seconds(1), "APNs answered 400 IdleTimeout")))
        let quarter = Duration.seconds(900)
        for (attempts, pause) in [
            (0, quarter), (1, quarter * 2), (3, quarter * 8), (4, quarter * 16), (5, quarter * 16),
            (1000, quarter * 16),
        ] {
            #expect(
                step(answered(503, "Shutdown"), attempts: attempts).fate == .later(pause, "APNs answered 503 Shutdown"))
        }
        #expect(step(answered(500, nil)).blame == .server)
        #expect(
            step(answered(429, "TooManyRequests"))
                == .init(.later(.seconds(60), "APNs answered 429 TooManyRequests"), .token))
        #expect(
            step(answered(429, "TooManyRequests"), attempts: 20).fate
                == .later(.seconds(3600), "APNs answered 429 TooManyRequests"))
        #expect(
            step(answered(429, "TooManyProviderTokenUpdates"))
                == .init(
                    .later(.seconds(1200), "APNs answered 429 TooManyProviderTokenUpdates"), .credential(.seconds(1200))
                ))
        let unreachable = PushFailure(kind: .connect, message: "nobody there", mayHaveArrived: false)
        #expect(step(.unanswered(unreachable)) == .init(.later(.seconds(5), "nobody there"), .server))
        #expect(step(.unanswered(unreachable), attempts: 9).fate == .later(.seconds(300), "nobody there"))
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
            step(answered(503, "Shutdown"), attempts: 0, firstSentAt: almost).fate
                == .later(.seconds(900), "APNs answered 503 Shutdown"))
        #expect(
            step(answered(503, "Shutdown"), attempts: 6, firstSentAt: dayAgo).fate
                == .failed("APNs answered 503 Shutdown; failed after 7 tries"))
        #expect(
            step(answered(503, "Shutdown"), expiration: 1_800_000_900).fate
                == .failed("APNs answered 503 Shutdown; its expiration comes before another try"))
        #expect(
            step(answered(503, "Shutdown"), expiration: 1_800_000_901).fate
                == .later(.seconds(900), "APNs answered 503 Shutdown"))
        #expect(
            step(answered(503, "Shutdown"), expiration: 0).fate
                == .failed("APNs answered 503 Shutdown; its expiration allows one try only"))
    }

    @Test func `a request that was not sent goes back unchanged`() {
        #expect(step(.withdrawn) == .init(.returned(nil)))
        #expect(
            step(
                .unanswered(
                    PushFailure(kind: .backingOff, message: "m", mayHaveArrived: false, retryAfter: .seconds(7))))
                == .init(.returned(.seconds(7)), .server))
        #expect(
            step(.unanswered(PushFailure(kind: .identity, message: "no key", mayHaveArrived: false)))
                == .init(.returned(nil), .topic("no key")))
        #expect(
            step(.unanswered(PushFailure(kind: .stopped, message: "m", mayHaveArrived: false))) == .init(.returned(nil))
        )
        #expect(step(.unsendable("too long")) == .init(.failed("too long")))
    }
}
