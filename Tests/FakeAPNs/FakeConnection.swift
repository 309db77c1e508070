import NIOCore
import NIOHPACK
import NIOHTTP2
import NIOSSL

/// One connection of a client: puts requests together, has them checked, and does what was decided.
///
/// It works on the frames of the connection directly. NIO's multiplexer would make a channel of each stream, which costs more
/// than all that is done here for a request.
final class FakeConnection: ChannelInboundHandler {
    typealias InboundIn = HTTP2Frame
    typealias OutboundOut = HTTP2Frame

    /// More than any payload that is accepted.
    private static let keptBody = 32 * 1024
    /// Of the connection; those of streams stay at HTTP/2's 65,535, which a payload that is accepted never needs up.
    private static let window = 16 * 1024 * 1024

    private struct Stream {
        var headers: HPACKHeaders
        var body = ByteBuffer()
        /// Of the whole body, kept or not.
        var length = 0
        /// Bytes since this stream's window was last renewed.
        var consumed = 0
    }

    private let core: FakeCore
    private let number: Int
    private let certificate: PeerCertificate
    private var authentication: Authentication
    private var identifiers = IdentifierMaker()
    /// Those that are not answered yet.
    private var streams: [HTTP2StreamID: Stream] = [:]
    private var consumed = 0
    private var mustProve: Bool
    private var goneAway: HTTP2StreamID?
    private var closesWhenIdle = false
    private var hasEnded = false
    private var mustFlush = false
    private var context: ChannelHandlerContext?

    init(core: FakeCore, number: Int, certificate: PeerCertificate) {
        self.core = core
        self.number = number
        self.certificate = certificate
        authentication = Authentication(ledger: core.tokens, options: core.options, certificate: certificate)
        mustProve = core.options.provesFirst
    }

    // What arrives --------------------------------------------------------------------------------------------------

    func handlerAdded(context: ChannelHandlerContext) {
        self.context = context
        write(.rootStream, .windowUpdate(windowSizeIncrement: Self.window - 65_535))
        context.flush()
    }

    func handlerRemoved(context: ChannelHandlerContext) {
        core.records.streamsClosed(streams.count)
        streams.removeAll()
        self.context = nil
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        let frame = unwrapInboundIn(data)
        if hasEnded { return }
        switch frame.payload {
        case .headers(let headers):
            if streams[frame.streamID] == nil {
                let stream = Stream(headers: headers.headers)
                core.records.streamOpened(ofConnection: streams.count + 1)
                streams[frame.streamID] = stream
            }
            // Else trailers, which APNs' protocol does not have: ignored.
            if headers.endStream { complete(frame.streamID) }
        case .data(let data):
            received(data, on: frame.streamID)
            if data.endStream { complete(frame.streamID) }
        case .rstStream:
            forget(frame.streamID)
        default: break
        }
    }

    func channelReadComplete(context: ChannelHandlerContext) {
        if mustFlush {
            mustFlush = false
            context.flush()
        }
        closeIfIdle()
    }

    func userInboundEventTriggered(context: ChannelHandlerContext, event: Any) {
        if let closed = event as? StreamClosedEvent { forget(closed.streamID) }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        // Clients that end by closing the socket are no fault of theirs here.
        if case .uncleanShutdown? = error as? NIOSSLError { return }
        // After GOAWAY and the last stream NIO calls every frame an error, also the acknowledgement of our SETTINGS.
        if goneAway != nil { return closeIfIdle() }
        core.records.fault(error)
        // NIO has already reset a single stream that was at fault, and said GOAWAY if it was the connection.
        if !(error is NIOHTTP2Errors.StreamError) { context.close(promise: nil) }
    }

    private func received(_ data: HTTP2Frame.FramePayload.Data, on id: HTTP2StreamID) {
        guard case .byteBuffer(var bytes) = data.data else { return }
        let cost = bytes.readableBytes + (data.paddingBytes.map { $0 + 1 } ?? 0)
        consumed += cost
        if consumed > Self.window / 2 {
            write(.rootStream, .windowUpdate(windowSizeIncrement: consumed))
            consumed = 0
        }
        guard var stream = streams.removeValue(forKey: id) else { return }
        stream.length += bytes.readableBytes
        if stream.body.readableBytes == 0 {
            stream.body = bytes
        } else if stream.length <= Self.keptBody {
            stream.body.writeBuffer(&bytes)
        }
        stream.consumed += cost
        if stream.consumed > 32_767, !data.endStream {
            write(id, .windowUpdate(windowSizeIncrement: stream.consumed))
            stream.consumed = 0
        }
        streams[id] = stream
    }

    // What is decided -----------------------------------------------------------------------------------------------

    private func complete(_ id: HTTP2StreamID) {
        guard let stream = streams[id] else { return }
        let now = core.options.now()
        let headers = RequestHeaders(stream.headers)
        let ownID = headers.apnsID.flatMap { Validation.isIdentifier($0) ? $0 : nil }
        let path = Validation.path(headers)
        let request = FakeRequest(
            token: try? path.get(), topic: headers.topic ?? certificate.topics.first, pushType: headers.pushType,
            priority: headers.priority, expiration: headers.expiration, collapseID: headers.collapseID,
            apnsID: ownID ?? identifiers.next(), hasOwnID: ownID != nil,
            providerToken: core.options.records.keepsRequests
                ? headers.authorization.flatMap(Authentication.bearer) : nil,
            connection: number, stream: Int(id), ordinal: core.requests.add(1, ordering: .relaxed).newValue, time: now,
            sinceStart: now - core.startedAt, body: stream.body)
        let answer: FakeAnswer
        if let refusal = refusal(headers, path, stream, at: now) {
            answer = .refused(refusal.status, refusal.reason)
        } else if let scripted = core.answer(request) {
            answer = scripted
        } else if let token = request.token, let death = core.deaths.death(of: token, topic: request.topic, at: now) {
            answer = .stale(at: death.at, reason: death.reason)
        } else {
            answer = .accepted
        }
        let exchange = FakeExchange(request: request, outcome: answer.outcome)
        core.records.exchanged(exchange)
        core.options.log?(exchange)
        if answer.delay > .zero {
            later(answer.delay) { [apnsID = request.apnsID] in self.perform(answer, on: id, apnsID) }
        } else {
            perform(answer, on: id, request.apnsID)
        }
    }

    private func refusal(
        _ headers: RequestHeaders, _ path: Result<String, Refusal>, _ stream: Stream, at now: Int64
    ) -> Refusal? {
        switch path {
        case .failure(let refusal): return refusal
        case .success(let token):
            if let refusal = authentication.refusal(headers.authorization, at: now) { return refusal }
            if mustProve {
                mustProve = false
                let raised = HTTP2Setting(parameter: .maxConcurrentStreams, value: core.options.maximumStreams)
                write(.rootStream, .settings(.settings([raised])))
            }
            return core.validation.message(
                headers, token: token, body: stream.body, length: stream.length, certificateTopics: certificate.topics)
        }
    }

    // What is done --------------------------------------------------------------------------------------------------

    private func perform(_ answer: FakeAnswer, on id: HTTP2StreamID, _ apnsID: String) {
        // The client may have reset it meanwhile.
        guard streams[id] != nil else { return }
        switch answer.action {
        case .status(let status, let reason, let timestamp):
            respond(status, reason.map { Self.body($0, timestamp) }, on: id, apnsID)
        case .raw(let raw): respond(raw, on: id)
        case .never: break
        case .reset(let code):
            write(id, .rstStream(HTTP2ErrorCode(networkCode: code)))
            forget(id)
        case .goAway(let goAway): leave(goAway, on: id, apnsID)
        case .close: context?.channel.dropped()
        }
    }

    private func respond(_ status: Int, _ body: String?, on id: HTTP2StreamID, _ apnsID: String) {
        var headers = HPACKHeaders()
        headers.reserveCapacity(3)
        headers.add(name: ":status", value: status == 200 ? "200" : String(status))
        // Never the same again: it would only push others out of the table.
        headers.add(name: "apns-id", value: apnsID, indexing: .nonIndexable)
        if core.options.sandbox {
            headers.add(name: "apns-unique-id", value: identifiers.next(), indexing: .nonIndexable)
        }
        write(id, .headers(.init(headers: headers, endStream: body == nil)))
        if let body { write(id, .data(.init(data: .byteBuffer(ByteBuffer(string: body)), endStream: true))) }
        forget(id)
    }

    /// As Apple writes it, to the byte.
    private static func body(_ reason: String, _ timestamp: Int64?) -> String {
        if let timestamp {
            "{\"reason\":\"\(reason)\",\"timestamp\":\(timestamp)}"
        } else {
            "{\"reason\":\"\(reason)\"}"
        }
    }

    private func respond(_ raw: FakeAnswer.Raw, on id: HTTP2StreamID) {
        var headers = HPACKHeaders([(":status", raw.status)])
        for (name, value) in raw.headers { headers.add(name: name, value: value) }
        let isEndless = if case .normally = raw.end { false } else { true }
        let endsAtOnce = raw.body.isEmpty && raw.bodyDelay == .zero && !isEndless
        write(id, .headers(.init(headers: headers, endStream: endsAtOnce)))
        if endsAtOnce { return forget(id) }
        let rest = { [self] in
            guard streams[id] != nil else { return }
            if !raw.body.isEmpty || !isEndless {
                write(id, .data(.init(data: .byteBuffer(ByteBuffer(bytes: raw.body)), endStream: !isEndless)))
            }
            switch raw.end {
            case .normally: forget(id)
            case .never: break
            case .reset(let code):
                // Else the reset would overtake what waits for the client's window.
                context?.flush()
                write(id, .rstStream(HTTP2ErrorCode(networkCode: code)))
                forget(id)
            }
        }
        if raw.bodyDelay > .zero { later(raw.bodyDelay, rest) } else { rest() }
    }

    private func leave(_ goAway: FakeAnswer.GoAway, on id: HTTP2StreamID, _ apnsID: String) {
        let last: HTTP2StreamID =
            switch goAway.last {
            case .thisProcessed: id
            case .thisNotProcessed: id == HTTP2StreamID(1) ? .rootStream : HTTP2StreamID(Int(id) - 2)
            case .maximum: .maxID
            }
        // A later GOAWAY may take back streams, not allow more.
        if goneAway.map({ last < $0 }) ?? true {
            goneAway = last
            let reason = goAway.reason.map { ByteBuffer(string: Self.body($0, nil)) }
            for dropped in streams.keys where dropped > last { forget(dropped) }
            write(
                .rootStream,
                .goAway(lastStreamID: last, errorCode: HTTP2ErrorCode(networkCode: goAway.code), opaqueData: reason))
        }
        switch goAway.closing {
        case .atOnce:
            end()
        case .afterStreams:
            if streams[id] != nil { respond(200, nil, on: id, apnsID) }
            closesWhenIdle = true
        }
    }

    private func closeIfIdle() {
        if closesWhenIdle, streams.isEmpty { end() }
    }

    /// Closes our half, and the other when the client has closed its own: a socket that is closed while something unread lies in it
    /// takes back what the client has not read either, GOAWAY and answers.
    private func end() {
        guard let context, !hasEnded else { return }
        hasEnded = true
        for id in streams.keys { forget(id) }
        context.flush()
        context.close(mode: .output, promise: nil)
        context.eventLoop.assumeIsolated().scheduleTask(in: .seconds(2)) { [self] in self.context?.close(promise: nil) }
    }

    private func later(_ delay: Duration, _ action: @escaping () -> Void) {
        guard let loop = context?.eventLoop.assumeIsolated() else { return }
        loop.scheduleTask(in: TimeAmount(delay)) { [self] in
            action()
            context?.flush()
            closeIfIdle()
        }
    }

    private func write(_ id: HTTP2StreamID, _ payload: HTTP2Frame.FramePayload) {
        mustFlush = true
        context?.write(wrapOutboundOut(HTTP2Frame(streamID: id, payload: payload)), promise: nil)
    }

    private func forget(_ id: HTTP2StreamID) {
        if streams.removeValue(forKey: id) != nil { core.records.streamsClosed(1) }
    }
}
