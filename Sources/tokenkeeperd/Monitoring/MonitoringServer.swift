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
    /// The most bytes of a request.
    static let longestRequest = 16 << 10
    /// A connection is closed after this time, whatever it is doing.
    static let longestLife: Duration = .seconds(10)

    private let group = MultiThreadedEventLoopGroup(numberOfThreads: 1)
    private let channel: any Channel

    /// Begins to listen.
    ///
    /// - Parameters:
    ///   - life: See `longestLife`.
    ///   - pages: Called on the server's thread. Must not wait for anything. Returns nil if there is no such page.
    init(
        _ address: ListenAddress, life: Duration = longestLife,
        _ pages: @escaping @Sendable (MonitoringRequest) -> MonitoringPage?
    ) throws {
        let connections = NIOLoopBoundBox.makeBoxSendingValue([any Channel](), eventLoop: group.next())
        let answered = NIOLoopBoundBox.makeBoxSendingValue(0, eventLoop: group.next())
        let bootstrap = ServerBootstrap(group: group)
            .serverChannelOption(.backlog, value: 64)
            .serverChannelOption(.socketOption(.so_reuseaddr), value: 1)
            .childChannelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    try Self.prepare(channel, connections, answered, life, pages)
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
        _ channel: any Channel, _ connections: NIOLoopBoundBox<[any Channel]>, _ answered: NIOLoopBoundBox<Int>,
        _ life: Duration,
        _ pages: @escaping @Sendable (MonitoringRequest) -> MonitoringPage?
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
        try pipeline.addHandler(MonitoringHandler(answered, pages))
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

/// Closes a connection whose request is too long.
private final class RequestLimit: ChannelInboundHandler {
    typealias InboundIn = ByteBuffer
    typealias InboundOut = ByteBuffer

    private var left: Int

    init(_ most: Int) {
        left = most
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        left -= unwrapInboundIn(data).readableBytes
        if left < 0 { context.close(promise: nil) } else { context.fireChannelRead(data) }
    }
}

/// Answers the first request of a connection, and closes it.
private final class MonitoringHandler: ChannelInboundHandler {
    typealias InboundIn = HTTPServerRequestPart
    typealias OutboundOut = HTTPServerResponsePart

    /// How many connections are being answered.
    private let answered: NIOLoopBoundBox<Int>
    private let pages: (MonitoringRequest) -> MonitoringPage?
    private var request: HTTPRequestHead?

    init(_ answered: NIOLoopBoundBox<Int>, _ pages: @escaping (MonitoringRequest) -> MonitoringPage?) {
        self.answered = answered
        self.pages = pages
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        switch unwrapInboundIn(data) {
        case .head(let head): request = request ?? head
        case .body: break
        case .end:
            guard let request else { return }
            answer(request, context)
        }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        context.close(promise: nil)
    }

    private func answer(_ request: HTTPRequestHead, _ context: ChannelHandlerContext) {
        let page = page(request, context)
        var head = HTTPResponseHead(version: .http1_1, status: page.status)
        head.headers.add(name: "content-type", value: page.type)
        head.headers.add(name: "content-length", value: String(page.body.readableBytes))
        head.headers.add(name: "connection", value: "close")
        for header in page.headers { head.headers.add(name: header.name, value: header.value) }
        if page.status == .methodNotAllowed { head.headers.add(name: "allow", value: "GET, HEAD") }
        context.write(wrapOutboundOut(.head(head)), promise: nil)
        if request.method != .HEAD {
            context.write(wrapOutboundOut(.body(.byteBuffer(page.body))), promise: nil)
        }
        let done = context.eventLoop.makePromise(of: Void.self)
        done.futureResult.assumeIsolated().whenComplete { _ in context.close(promise: nil) }
        context.writeAndFlush(wrapOutboundOut(.end(nil)), promise: done)
    }

    private func page(_ request: HTTPRequestHead, _ context: ChannelHandlerContext) -> MonitoringPage {
        guard request.method == .GET || request.method == .HEAD else {
            return MonitoringPage(status: .methodNotAllowed, text: "only GET is allowed\n")
        }
        let hosts = request.headers["host"]
        let asked = MonitoringRequest(
            path: String(request.uri.prefix { $0 != "?" }), host: hosts.isEmpty ? nil : hosts.joined(separator: ","),
            isLocal: Self.isLocal(context.channel.remoteAddress))
        let page = pages(asked) ?? MonitoringPage(status: .notFound, text: "there is /metrics, /live and /ready\n")
        if page.isAlwaysServed { return page }
        guard answered.value < MonitoringServer.mostAnswered else {
            return MonitoringPage(status: .serviceUnavailable, text: "too many requests at a time\n")
        }
        answered.value += 1
        context.channel.closeFuture.whenComplete { [answered] _ in answered.value -= 1 }
        return page
    }

    /// Whether the client is on this machine: at a loopback address, or at a Unix socket.
    private static func isLocal(_ address: SocketAddress?) -> Bool {
        guard let address else { return false }
        guard let ip = address.ipAddress else { return address.protocol == .unix }
        return ip == "::1" || ip.hasPrefix("127.") || ip.hasPrefix("::ffff:127.")
    }
}
