public import TokenModel

/// How a client connects, and how much it does at a time.
public struct PushClientOptions: Sendable {
    /// Replaces Apple's servers, by environment.
    public var servers: [Environment: PushServer]
    /// A PEM file with the only certificates to trust, those of an HTTPS proxy included. Nil for those that the system trusts.
    public var authorityFile: String?
    /// Through which proxy the client connects, if any.
    public var route: PushRoute
    /// The most requests in flight to a server: 1 or more. APNs allows 1000 per connection.
    public var inFlight: Int
    /// The most connections to a server: 1 or more. The client opens another one only when the first is full.
    public var connections: Int
    /// How long a connection may take, from name resolution to the end of the TLS handshake.
    public var connectTimeout: Duration
    /// How long a response may take, from the last byte of the request to the last byte of the response. Writing a request may take as
    /// long.
    public var answerTimeout: Duration
    /// How long a connection may be silent before a PING asks whether the server is there: an hour, as Apple wants. Connections stay
    /// open as long as the server likes. With requests in flight, a PING follows after a third of `answerTimeout`.
    public var idleTimeout: Duration
    /// After a standstill longer than this, the client sends none of its requests: another daemon may have taken them over.
    public var standstill: Duration
    /// Told which requests may have been sent.
    public var observer: (any SendObserver)?
    /// Receives libcurl's debug log and the client's own messages about its connections, line by line, without secrets and whole device
    /// tokens.
    public var trace: (@Sendable (String) -> Void)?

    public init(
        servers: [Environment: PushServer] = [:], authorityFile: String? = nil, route: PushRoute = .environment,
        inFlight: Int = 500, connections: Int = 2, connectTimeout: Duration = .seconds(10),
        answerTimeout: Duration = .seconds(30),
        idleTimeout: Duration = .seconds(3600), standstill: Duration = .seconds(30),
        trace: (@Sendable (String) -> Void)? = nil
    ) {
        self.servers = servers
        self.authorityFile = authorityFile
        self.route = route
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
