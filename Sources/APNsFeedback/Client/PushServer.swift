public import TokenModel

/// Where an environment's requests go.
public struct PushServer: Sendable, Hashable {
    /// A host name or an address, as its certificate has it.
    public var host: String
    /// 1 to 65535; Apple's listens on 443 and on 2197.
    public var port: Int

    public init(host: String, port: Int = 443) {
        self.host = host
        self.port = port
    }

    /// Apple's server of an environment. Source: Apple, "Sending notification requests to APNs".
    public static func apple(_ environment: Environment) -> PushServer {
        switch environment {
        case .production: PushServer(host: "api.push.apple.com")
        case .sandbox: PushServer(host: "api.sandbox.push.apple.com")
        }
    }
}

/// How a client connects, and how much it does at a time.
///
/// The environment variables that libcurl knows, `https_proxy` and `no_proxy`, hold for it as for everything else on the
/// machine that speaks through libcurl: providers behind a proxy have no other way.
public struct PushClientOptions: Sendable {
    /// An environment that is not among them has Apple's.
    public var servers: [Environment: PushServer]
    /// A file of certificates in PEM: those are trusted, and no others. Nil: those that the system trusts.
    public var authorityFile: String?
    /// The most requests that a server has not yet answered: 1 or more. APNs allows 1000 on a connection.
    public var inFlight: Int
    /// The most connections to a server: 1 or more. Another one is opened only when the server allows no more on the first.
    public var connections: Int
    /// How long a connection may take from the name to the end of the TLS handshake.
    public var connectTimeout: Duration
    /// How long an answer may take, from the request being handed to the connection to the answer's last byte.
    public var answerTimeout: Duration
    /// How long a connection without requests is still taken for a good one. Apple wants connections kept for hours, and a
    /// PING after an hour without traffic; libcurl 7.88 sends no PING on connections of a multi handle, hence an hour.
    public var idleTimeout: Duration
    /// When the client stood still for longer than this, it begins and repeats nothing of what it has: another daemon may have it now.
    public var standstill: Duration
    /// What libcurl does, line by line, for debugging. Neither a provider token nor a whole device token is in it.
    public var trace: (@Sendable (String) -> Void)?

    public init(
        servers: [Environment: PushServer] = [:], authorityFile: String? = nil, inFlight: Int = 500,
        connections: Int = 2, connectTimeout: Duration = .seconds(10), answerTimeout: Duration = .seconds(30),
        idleTimeout: Duration = .seconds(3600), standstill: Duration = .seconds(30),
        trace: (@Sendable (String) -> Void)? = nil
    ) {
        self.servers = servers
        self.authorityFile = authorityFile
        self.inFlight = inFlight
        self.connections = connections
        self.connectTimeout = connectTimeout
        self.answerTimeout = answerTimeout
        self.idleTimeout = idleTimeout
        self.standstill = standstill
        self.trace = trace
    }

    func server(of environment: Environment) -> PushServer {
        servers[environment] ?? .apple(environment)
    }
}
