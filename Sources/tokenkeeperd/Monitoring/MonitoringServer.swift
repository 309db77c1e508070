internal import Glibc
internal import NIOCore
internal import NIOHTTP1
internal import NIOPosix

/// Serves scrapes and health checks over HTTP/1.1, on a thread of its own. It asks `pages` for the responses and knows nothing else.
///
/// One request per connection, and everything is bounded: connections, the size of a request, and the life of a connection. So neither
/// many clients nor slow ones cost the daemon more than a few megabytes, and they do not keep others out.
final class MonitoringServer: Sendable {
    /// The connections to which a page is being sent at a time; more get 503, except for health checks.
    static let mostAnswered = 16
    /// With more connections than this, the oldest is closed: a client that sends its request at once is served, whatever others do.
    static let mostConnections = 64
    /// The most bytes of a request, and of the body of a POST.
    static let (longestRequest, longestForm) = (16 << 10, 4 << 10)
    /// A connection is closed after this time, whatever it is doing.
    static let longestLife: Duration = .seconds(10)

    typealias Pages = @Sendable (MonitoringRequest) -> MonitoringReply?

    private let group = MultiThreadedEventLoopGroup(numberOfThreads: 1)
    private let channel: any Channel

    /// Begins to listen.
    ///
    /// - Parameters:
    ///   - life: See `longestLife`.
    ///   - forms: The paths that also take a POST.
    ///   - pages: Called on the server's thread. Must not wait for anything. Returns nil if there is no such page.
    init(
        _ address: ListenAddress, life: Duration = longestLife, forms: Set<String> = [], _ pages: @escaping Pages
    ) throws {
        let connections = NIOLoopBoundBox.makeBoxSendingValue([any Channel](), eventLoop: group.next())
        let answered = NIOLoopBoundBox.makeBoxSendingValue(0, eventLoop: group.next())
        let bootstrap = ServerBootstrap(group: group)
            .serverChannelOption(.backlog, value: 64)
            .serverChannelOption(.socketOption(.so_reuseaddr), value: 1)
            .childChannelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    try Self.prepare(channel, connections, life, MonitoringHandler(answered, forms, pages))
                }
            }
        do {
            switch address {
            case .tcp(let host, let port): channel = try bootstrap.bind(host: host, port: port).wait()
            case .unix(let path):
                try SocketFile.makeWay(at: path)
                channel = try bootstrap.bind(unixDomainSocketPath: path).wait()
                _ = unsafe chmod(path, SocketFile.mode)
            }
        } catch {
            try? group.syncShutdownGracefully()
            throw error
        }
    }

    /// The port it listens on; nil for a Unix socket.
    var port: Int? { channel.localAddress?.port }

    private static func prepare(
        _ channel: any Channel, _ connections: NIOLoopBoundBox<[any Channel]>, _ life: Duration,
        _ handler: MonitoringHandler
    ) throws {
        if connections.value.count == mostConnections {
            let oldest = connections.value.removeFirst()
            oldest.close(promise: nil)
        }
        connections.value.append(channel)
        channel.closeFuture.whenComplete { _ in connections.value.removeAll { $0 === channel } }
        let deadline = channel.eventLoop.scheduleTask(in: TimeAmount(life)) { channel.close(promise: nil) }
        channel.closeFuture.whenComplete { _ in deadline.cancel() }
        let pipeline = channel.pipeline.syncOperations
        try pipeline.addHandler(RequestLimit(longestRequest))
        try pipeline.configureHTTPServerPipeline(withPipeliningAssistance: false)
        try pipeline.addHandler(handler)
    }

    /// Stops listening, and closes all connections.
    func stop() {
        try? group.syncShutdownGracefully()
    }
}

/// What a client asks for.
struct MonitoringRequest: Sendable {
    /// Without the query.
    var path: String
    /// The Host header; nil if there is none. Several are joined by commas, which no host has.
    var host: String?
    /// Whether the client is on this machine.
    var isLocal: Bool
    /// The body of a POST; nil for other methods. It may have a device token.
    var form: String?
}

/// What a client gets.
enum MonitoringReply: Sendable {
    case now(MonitoringPage)
    /// Called once, on the server's thread, with what takes the page: at any time, on any thread. It must not wait for anything. If the page has
    /// not come within the time, the client gets the other one.
    case later(
        within: Duration, otherwise: MonitoringPage, @Sendable (@escaping @Sendable (MonitoringPage) -> Void) -> Void)
}

/// A response.
struct MonitoringPage: Sendable {
    var status: HTTPResponseStatus
    /// The content type.
    var type: String
    /// Further headers.
    var headers: [(name: String, value: String)]
    /// Whether it is served even while too many others are.
    var isAlwaysServed: Bool
    /// Shared by all connections that it is sent to.
    let body: ByteBuffer

    init(
        status: HTTPResponseStatus = .ok, type: String = "text/plain; charset=utf-8",
        headers: [(name: String, value: String)] = [], isAlwaysServed: Bool = false, text: String
    ) {
        self.status = status
        self.type = type
        self.headers = headers
        self.isAlwaysServed = isAlwaysServed
        body = ByteBuffer(string: text)
    }
}
