import NIOCore
import NIOHTTP1
import NIOPosix
import Synchronization

/// The backend of the servers: HTTP/1.1 without TLS. It records the `apns-id` of each request that has arrived whole, and answers at
/// once: 410 if the path ends in `0`, 200 otherwise.
final class Backend: Sendable {
    static let stale = #"{"reason":"Unregistered","timestamp":1508249865488}"#

    struct Seen {
        /// How often each `apns-id` has arrived.
        var counts: [String: Int] = [:]
        /// Requests without an `apns-id`.
        var nameless = 0
    }

    let port: Int
    private let group: MultiThreadedEventLoopGroup
    private let records: Records

    init() throws {
        group = MultiThreadedEventLoopGroup(numberOfThreads: 1)
        let records = Records()
        self.records = records
        let listener = try ServerBootstrap(group: group)
            .serverChannelOption(.backlog, value: 1024)
            .childChannelOption(.tcpOption(.tcp_nodelay), value: 1)
            .childChannelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    let pipeline = channel.pipeline.syncOperations
                    try pipeline.configureHTTPServerPipeline(withPipeliningAssistance: false)
                    try pipeline.addHandler(BackendConnection(records))
                    records.open.add(1, ordering: .relaxed)
                    channel.closeFuture.whenComplete { _ in records.open.subtract(1, ordering: .releasing) }
                }
            }
            .bind(host: "127.0.0.1", port: 0).wait()
        port = listener.localAddress?.port ?? 0
    }

    var seen: Seen { records.seen.withLock { $0 } }

    func hasSeen(_ id: String) -> Bool { records.seen.withLock { $0.counts[id] != nil } }

    /// Whether no connection is open. Then every request that a killed server had sent is recorded.
    var isIdle: Bool { records.open.load(ordering: .acquiring) == 0 }

    func stop() {
        try? group.syncShutdownGracefully()
    }
}

private final class Records: Sendable {
    let seen = Mutex(Backend.Seen())
    let open = Atomic(0)
}

private final class BackendConnection: ChannelInboundHandler {
    typealias InboundIn = HTTPServerRequestPart
    typealias OutboundOut = HTTPServerResponsePart

    private let records: Records
    private var head: HTTPRequestHead?

    init(_ records: Records) { self.records = records }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        switch unwrapInboundIn(data) {
        case .head(let head): self.head = head
        case .body: break
        case .end:
            guard let head else { return }
            let id = head.headers.first(name: "apns-id")
            records.seen.withLock { seen in
                if let id { seen.counts[id, default: 0] += 1 } else { seen.nameless += 1 }
            }
            answer(context, id, isStale: head.uri.utf8.last == UInt8(ascii: "0"))
        }
    }

    private func answer(_ context: ChannelHandlerContext, _ id: String?, isStale: Bool) {
        let body = isStale ? Backend.stale : ""
        var headers: HTTPHeaders = ["content-length": String(body.utf8.count)]
        if let id { headers.add(name: "apns-id", value: id) }
        let head = HTTPResponseHead(version: .http1_1, status: isStale ? .gone : .ok, headers: headers)
        context.write(wrapOutboundOut(.head(head)), promise: nil)
        if isStale { context.write(wrapOutboundOut(.body(.byteBuffer(ByteBuffer(string: body)))), promise: nil) }
        context.writeAndFlush(wrapOutboundOut(.end(nil)), promise: nil)
    }

    // A server that was killed.
    func errorCaught(context: ChannelHandlerContext, error: any Error) { context.close(promise: nil) }
}
