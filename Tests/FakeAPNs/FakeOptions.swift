import Foundation

/// A provider's `.p8` key as Apple knows it: the public half, its identifier and its team.
public struct FakeSigningKey: Sendable {
    /// The `kid` of JWTs. Apple's have ten characters.
    public var id: String
    /// The `iss` of JWTs. Apple's have ten characters.
    public var team: String
    /// PEM, `BEGIN PUBLIC KEY`, P-256.
    public var publicKey: String

    public init(id: String, team: String, publicKey: String) {
        self.id = id
        self.team = team
        self.publicKey = publicKey
    }
}

/// How the fake APNs behaves, apart from its script.
public struct FakeOptions: Sendable {
    /// How much is recorded about requests.
    public enum Records: Sendable {
        /// Only counts by status and reason, for benchmarks.
        case counts
        /// Also the latest requests, up to this number, and how often each `apns-id` was seen.
        case latest(Int)

        var keepsRequests: Bool {
            if case .latest = self { true } else { false }
        }
    }

    /// How often the JWT of a key may change before 429 TooManyProviderTokenUpdates. Apple allows one change in 20 minutes.
    public enum TokenUpdates: Sendable {
        case unlimited
        case every20MinutesPerConnection, every20MinutesPerServer
    }

    public var host = "127.0.0.1"
    /// 0 for a free port, which `FakeAPNs.port` has.
    public var port = 0
    /// Event loop threads. One is enough for tens of thousands of requests a second.
    public var threads = 1

    /// Path of the server's certificate, PEM, with the chain if there is one.
    public var certificate: String
    /// Path of its key, PEM.
    public var privateKey: String

    public var signingKeys: [FakeSigningKey] = []
    /// If false, JWTs are neither required nor checked.
    public var requiresProviderToken = true
    public var tokenUpdates = TokenUpdates.unlimited
    /// Path of a CA, PEM. Clients may then use a certificate of this CA instead of JWTs. Other certificates get 403 BadCertificate.
    public var clientAuthority: String?

    /// The allowed topics; all if empty.
    public var topics: Set<String> = []
    /// The device tokens that exist, hex in lower case. Nil if all well-formed ones do.
    public var knownTokens: Set<String>?
    /// Whether answers have `apns-unique-id`, as those of api.sandbox.push.apple.com do.
    public var sandbox = false
    /// Whether answers have a `date`, by the clock `now`.
    public var datesAnswers = false

    /// SETTINGS_MAX_CONCURRENT_STREAMS. With 1, a connection never has more than one stream.
    public var maximumStreams = 1000
    /// More settings, and changes to them while a connection is open.
    public var settings: [FakeSettings] = []
    /// The most RST_STREAM frames that a client may send on a connection within 30 seconds: 1 to 1,000,000. Beyond that, the
    /// connection ends with GOAWAY (ENHANCE_YOUR_CALM). 200 is the limit of Netty and NIO; that of APNs is not known.
    public var maximumResets = 200
    /// Whether a connection is limited to one stream until a valid JWT has arrived on it, as at APNs.
    public var provesFirst = false

    public var records = Records.latest(10_000)
    /// Called for each request when its answer is decided, on the thread of its connection. It must not block.
    public var log: (@Sendable (FakeExchange) -> Void)?
    /// Milliseconds since the Unix epoch. A test may control this clock.
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
