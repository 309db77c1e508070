import Foundation

/// A `.p8` key of a provider, as Apple knows it: its public half, its name and whose it is.
public struct FakeSigningKey: Sendable {
    /// The `kid` of JWTs, ten characters at Apple.
    public var id: String
    /// The `iss` of JWTs, ten characters at Apple.
    public var team: String
    /// PEM, `BEGIN PUBLIC KEY`, P-256.
    public var publicKey: String

    public init(id: String, team: String, publicKey: String) {
        self.id = id
        self.team = team
        self.publicKey = publicKey
    }
}

/// How the fake APNs behaves before any script has its say.
public struct FakeOptions: Sendable {
    /// How much of what was received is kept for questions.
    public enum Records: Sendable {
        /// Counts by status and reason only: what a benchmark wants.
        case counts
        /// Also each request, the latest so many, and how often each `apns-id` was seen.
        case latest(Int)

        var keepsRequests: Bool {
            if case .latest = self { true } else { false }
        }
    }

    /// How often a new JWT of one key may appear before 429 TooManyProviderTokenUpdates. Apple says every 20 minutes at most.
    public enum TokenUpdates: Sendable {
        case unlimited
        case every20MinutesPerConnection, every20MinutesPerServer
    }

    public var host = "127.0.0.1"
    /// 0 takes a free one; `FakeAPNs.port` tells which.
    public var port = 0
    /// Event loop threads. One is enough for tens of thousands of requests a second.
    public var threads = 1

    /// Path of the server's certificate, PEM, with the chain if there is one.
    public var certificate: String
    /// Path of its key, PEM.
    public var privateKey: String

    public var signingKeys: [FakeSigningKey] = []
    /// False lets everybody in; a JWT that comes nevertheless is not looked at.
    public var requiresProviderToken = true
    public var tokenUpdates = TokenUpdates.unlimited
    /// Path of a CA, PEM. Clients may then present a certificate of it instead of JWTs; other certificates get 403 BadCertificate.
    public var clientAuthority: String?

    /// The topics that may be sent to; empty: all.
    public var topics: Set<String> = []
    /// The device tokens that exist, hex in lower case; nil: all that are well-formed.
    public var knownTokens: Set<String>?
    /// Answers have `apns-unique-id`, as those of api.sandbox.push.apple.com.
    public var sandbox = false

    /// SETTINGS_MAX_CONCURRENT_STREAMS. At 1, a client has one stream a connection for good.
    public var maximumStreams = 1000
    /// More settings, and changes of them while a connection lives.
    public var settings: [FakeSettings] = []
    /// So many RST_STREAM frames a connection may send within 30 seconds, or it ends with GOAWAY (ENHANCE_YOUR_CALM). Netty's and
    /// NIO's limit; what APNs has is not known. 1 to 1,000,000.
    public var maximumResets = 200
    /// One stream a connection until a valid JWT was seen on it, then `maximumStreams`: what APNs does.
    public var provesFirst = false

    public var records = Records.latest(10_000)
    /// Told of every request when its answer is decided, on the thread of its connection. It must not block.
    public var log: (@Sendable (FakeExchange) -> Void)?
    /// Milliseconds since the Unix epoch. A test may hold the clock in its hand.
    public var now: @Sendable () -> Int64 = FakeOptions.systemClock

    public init(certificate: String, privateKey: String) {
        self.certificate = certificate
        self.privateKey = privateKey
    }

    /// With the server's certificate and the signing key of a test authority.
    public init(_ authority: TestAuthority) {
        self.init(certificate: authority.server.certificate, privateKey: authority.server.key)
        signingKeys = [authority.signingKey]
    }

    public static let systemClock: @Sendable () -> Int64 = {
        var time = timespec()
        clock_gettime(CLOCK_REALTIME, &time)
        return Int64(time.tv_sec) * 1000 + Int64(time.tv_nsec) / 1_000_000
    }
}
