internal import NIOCore
internal import NIOHTTP1

/// Closes a connection whose request is too long.
final class RequestLimit: ChannelInboundHandler {
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
final class MonitoringHandler: ChannelInboundHandler {
    typealias InboundIn = HTTPServerRequestPart
    typealias OutboundOut = HTTPServerResponsePart

    /// How many connections are being answered.
    private let answered: NIOLoopBoundBox<Int>
    private let forms: Set<String>
    private let pages: MonitoringServer.Pages
    private var request: HTTPRequestHead?
    private var isComplete = false
    private var body = ByteBuffer()
    /// Whether a page that had to be waited for, or the one instead of it, is being sent.
    private var isAnswered = false

    init(_ answered: NIOLoopBoundBox<Int>, _ forms: Set<String>, _ pages: @escaping MonitoringServer.Pages) {
        self.answered = answered
        self.forms = forms
        self.pages = pages
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        // A client that sends its next request at once gets no response to it.
        guard !isComplete else { return }
        switch unwrapInboundIn(data) {
        case .head(let head): request = head
        case .body(var part): body.writeBuffer(&part)
        case .end:
            guard let request else { return }
            isComplete = true
            answer(request, context)
        }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        context.close(promise: nil)
    }

    private func answer(_ request: HTTPRequestHead, _ context: ChannelHandlerContext) {
        switch reply(to: request, context) {
        case .now(let page): send(page, request, context)
        case .later(let limit, let late, let start):
            let loop = context.eventLoop
            let bound = NIOLoopBound((self, context), eventLoop: loop)
            let send = { @Sendable (page: MonitoringPage) in
                let (handler, context) = bound.value
                if handler.isAnswered || !context.channel.isActive { return }
                handler.isAnswered = true
                handler.send(page, request, context)
            }
            let deadline = loop.scheduleTask(in: TimeAmount(limit)) { send(late) }
            context.channel.closeFuture.whenComplete { _ in deadline.cancel() }
            start { page in loop.execute { send(page) } }
        }
    }

    /// Sends a page, unless too many others are being sent.
    private func send(_ page: MonitoringPage, _ request: HTTPRequestHead, _ context: ChannelHandlerContext) {
        var page = page
        if !page.isAlwaysServed {
            if answered.value < MonitoringServer.mostAnswered {
                answered.value += 1
                context.channel.closeFuture.whenComplete { [answered] _ in answered.value -= 1 }
            } else {
                page = MonitoringPage(status: .serviceUnavailable, text: "too many requests at a time\n")
            }
        }
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

    private func reply(to request: HTTPRequestHead, _ context: ChannelHandlerContext) -> MonitoringReply {
        let path = String(request.uri.prefix { $0 != "?" })
        let isForm = request.method == .POST && forms.contains(path)
        guard isForm || request.method == .GET || request.method == .HEAD else {
            return .now(MonitoringPage(status: .methodNotAllowed, text: "only GET is allowed\n"))
        }
        guard body.readableBytes <= MonitoringServer.longestForm else {
            return .now(MonitoringPage(status: .payloadTooLarge, text: "expected at most 4096 bytes\n"))
        }
        let hosts = request.headers["host"]
        let asked = MonitoringRequest(
            path: path, host: hosts.isEmpty ? nil : hosts.joined(separator: ","),
            isLocal: Self.isLocal(context.channel.remoteAddress) && !Self.isForwarded(request),
            form: isForm ? String(buffer: body) : nil)
        return pages(asked) ?? .now(MonitoringPage(status: .notFound, text: "there is /metrics, /live and /ready\n"))
    }

    /// Whether a proxy on this machine passes a request on, for a client elsewhere.
    private static func isForwarded(_ request: HTTPRequestHead) -> Bool {
        ["forwarded", "via", "x-forwarded-for", "x-real-ip"].contains { request.headers.contains(name: $0) }
    }

    /// Whether the client is on this machine: at a loopback address, or at a Unix socket.
    private static func isLocal(_ address: SocketAddress?) -> Bool {
        guard let address else { return false }
        guard let ip = address.ipAddress else { return address.protocol == .unix }
        return ip == "::1" || ip.hasPrefix("127.") || ip.hasPrefix("::ffff:127.")
    }
}
