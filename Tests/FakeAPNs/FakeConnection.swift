import NIOCore
import NIOHPACK
import NIOHTTP2

/// One connection of a client: assembles requests, has them checked, and sends the answers.
///
/// It handles the frames of the connection directly. NIO's multiplexer would make a channel for each stream, which costs more
/// than everything else here.
///
/// GOAWAY is written below NIO. If NIO knew of it, it would reset all streams that arrive later, but a server still answers those up
/// to the last stream. So the connection itself drops the streams above it.
final class FakeConnection: ChannelInboundHandler {
    typealias InboundIn = HTTP2Frame
    typealias OutboundOut = HTTP2Frame

    /// The most bytes of a body that are kept: more than any accepted payload has.
    private static let keptBody = 32 * 1024
    /// The connection's window. The streams' windows are a setting, by default HTTP/2's 65,535, which no accepted payload fills.
    private static let window = 16 * 1024 * 1024

    struct Stream {
        var headers: HPACKHeaders
        var body = ByteBuffer()
        /// The length of the whole body, kept or not.
        var length = 0
        /// Bytes since this stream's window was last renewed.
        var consumed = 0
        /// The exchange that waits to be sent. Nil before the decision, and for streams that are answered at once.
        var exchange: FakeExchange?
    }

    let core: FakeCore
    private let number: Int
    private let certificate: PeerCertificate
    private var authentication: Authentication
    var identifiers = IdentifierMaker()
    /// The streams that are not answered yet.
    var streams: [HTTP2StreamID: Stream] = [:]
    /// The highest stream that has arrived and was not refused.
    private(set) var latest = HTTP2StreamID.rootStream
    private var requests = 0
    private var consumed = 0
    /// SETTINGS_INITIAL_WINDOW_SIZE.
    private var initialWindow: Int
    private var mustProve: Bool
    /// The last stream of the latest GOAWAY, except for notices.
    var goneAway: HTTP2StreamID?
    /// The actions that wait for the answer to a PING, in order.
    var afterRoundTrip: [() -> Void] = []
    var closesWhenIdle = false
    var hasEnded = false
    private var mustFlush = false
    private var wroteBeneath = false
    var context: ChannelHandlerContext?
    /// The context of NIO's handler. Bytes written to it go to the client unchanged.
    private var beneath: ChannelHandlerContext?

    init(core: FakeCore, number: Int, certificate: PeerCertificate) {
        self.core = core
        self.number = number
        self.certificate = certificate
        authentication = Authentication(ledger: core.tokens, options: core.options, certificate: certificate)
        mustProve = core.options.provesFirst
        initialWindow = core.settings.withLock { $0.initialWindow ?? 65_535 }
    }

    // Reading --------------------------------------------------------------------------------------------------

    func handlerAdded(context: ChannelHandlerContext) {
        self.context = context
        beneath = try? context.pipeline.syncOperations.context(handlerType: NIOHTTP2Handler.self)
        write(.rootStream, .windowUpdate(windowSizeIncrement: Self.window - 65_535))
        flush()
        for settings in core.options.settings where settings.after > .zero {
            later(settings.after) { [self] in change(settings) }
        }
    }

    func handlerRemoved(context: ChannelHandlerContext) {
        core.records.streamsClosed(streams.count)
        streams.removeAll()
        afterRoundTrip.removeAll()
        self.context = nil
        beneath = nil
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        let frame = unwrapInboundIn(data)
        if hasEnded { return }
        switch frame.payload {
        case .headers(let headers):
            if let goneAway, frame.streamID > goneAway { return }
            if streams[frame.streamID] == nil {
                if frame.streamID > latest { latest = frame.streamID }
                let stream = Stream(headers: headers.headers)
                core.records.streamOpened(ofConnection: streams.count + 1)
                streams[frame.streamID] = stream
            }
            // Otherwise they are trailers, which APNs' protocol does not have: ignored.
            if headers.endStream { complete(frame.streamID) }
        case .data(let data):
            received(data, on: frame.streamID)
            if data.endStream { complete(frame.streamID) }
        case .rstStream:
            forget(frame.streamID)
        case .ping(_, ack: true):
            if !afterRoundTrip.isEmpty { afterRoundTrip.removeFirst()() }
        default: break
        }
    }

    func channelReadComplete(context: ChannelHandlerContext) {
        if mustFlush { flush() }
        closeIfIdle()
    }

    func userInboundEventTriggered(context: ChannelHandlerContext, event: Any) {
        if let closed = event as? StreamClosedEvent { forget(closed.streamID) }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        // A client whose bytes arrive after our close makes no mistake.
        if hasEnded { return }
        core.records.fault(error)
        // NIO has already reset the stream at fault, or sent GOAWAY if the connection was at fault.
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
        if initialWindow > 0, 2 * stream.consumed > initialWindow, !data.endStream {
            write(id, .windowUpdate(windowSizeIncrement: stream.consumed))
            stream.consumed = 0
        }
        streams[id] = stream
    }

    // Deciding -----------------------------------------------------------------------------------------------

    private func complete(_ id: HTTP2StreamID) {
        guard let stream = streams[id] else { return }
        let now = core.options.now()
        let headers = RequestHeaders(stream.headers)
        let ownID = headers.apnsID.flatMap { Validation.isIdentifier($0) ? $0 : nil }
        let path = Validation.path(headers)
        requests += 1
        let request = FakeRequest(
            token: try? path.get(), topic: headers.topic ?? certificate.topics.first, pushType: headers.pushType,
            priority: headers.priority, expiration: headers.expiration, collapseID: headers.collapseID,
            apnsID: ownID ?? identifiers.next(), hasOwnID: ownID != nil,
            providerToken: core.options.records.keepsRequests
                ? headers.authorization.flatMap(Authentication.bearer) : nil,
            connection: number, stream: Int(id), ordinal: core.requests.add(1, ordering: .relaxed).newValue,
            ordinalOfConnection: requests, time: now, sinceStart: now - core.startedAt, body: stream.body)
        let answer: FakeAnswer
        if let channels = core.channels.answer(headers, stream.body, &identifiers) {
            answer =
                authentication.refusal(headers.authorization, at: now).map { .refused($0.status, $0.reason) }
                ?? channels
        } else if let refusal = refusal(headers, path, stream, at: now) {
            answer = .refused(refusal.status, refusal.reason)
        } else if let scripted = core.answer(request) {
            answer = scripted
        } else if let token = request.token, let death = core.deaths.death(of: token, topic: request.topic, at: now) {
            answer = .stale(at: death.at, reason: death.reason)
        } else {
            answer = .accepted
        }
        let exchange = FakeExchange(
            request: request, outcome: answer.outcome(on: Int(id)), isRefused: answer.refuses(Int(id)))
        core.records.exchanged(exchange)
        core.options.log?(exchange)
        if let gate = answer.gate {
            hold(until: gate) { [apnsID = request.apnsID] in self.perform(answer, on: id, apnsID) }
        } else if answer.delay > .zero {
            later(answer.delay) { [apnsID = request.apnsID] in self.perform(answer, on: id, apnsID) }
        } else {
            perform(answer, on: id, request.apnsID)
        }
        streams[id]?.exchange = exchange
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
                change(FakeSettings(maximumStreams: core.settings.withLock { $0.maximumStreams }))
            }
            return core.validation.message(
                headers, token: token, body: stream.body, length: stream.length, certificateTopics: certificate.topics)
        }
    }

    /// Sends SETTINGS. Their limits apply from now on.
    func change(_ settings: FakeSettings) {
        if hasEnded { return }
        if let window = settings.initialWindow { initialWindow = window }
        write(.rootStream, .settings(.settings(settings.frame)))
        flush()
    }

    // Writing -----------------------------------------------------------------------------------------------

    func write(_ id: HTTP2StreamID, _ payload: HTTP2Frame.FramePayload) {
        mustFlush = true
        context?.write(wrapOutboundOut(HTTP2Frame(streamID: id, payload: payload)), promise: nil)
    }

    /// Writes a frame below NIO.
    func writeBeneath(type: UInt8, on id: HTTP2StreamID, _ payload: ByteBuffer) {
        mustFlush = true
        wroteBeneath = true
        var frame = ByteBuffer()
        frame.writeInteger(UInt32(payload.readableBytes) << 8 | UInt32(type))
        frame.writeInteger(UInt8(0))  // flags
        frame.writeInteger(UInt32(Int(id)))
        frame.writeImmutableBuffer(payload)
        beneath?.write(NIOAny(frame), promise: nil)
    }

    func flush() {
        mustFlush = false
        context?.flush()
        // NIO flushes only what it has written itself.
        if wroteBeneath {
            wroteBeneath = false
            beneath?.flush()
        }
    }

    func later(_ delay: Duration, _ action: @escaping () -> Void) {
        guard let loop = context?.eventLoop.assumeIsolated() else { return }
        loop.scheduleTask(in: TimeAmount(delay)) { [self] in act(action) }
    }

    private func hold(until gate: FakeGate, _ action: @escaping () -> Void) {
        guard let loop = context?.eventLoop else { return }
        let held = NIOLoopBound({ [self] in act(action) }, eventLoop: loop)
        gate.whenOpen { loop.execute { held.value() } }
    }

    private func act(_ action: () -> Void) {
        action()
        flush()
        closeIfIdle()
    }

    func forget(_ id: HTTP2StreamID) {
        if streams.removeValue(forKey: id) != nil { core.records.streamsClosed(1) }
    }
}
