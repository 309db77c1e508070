import COpenSSL
import NIOCore
import NIOHTTP2
import NIOTLS

/// Waits for the end of the TLS handshake. A client that speaks h2 gets the rest of the pipeline; all other connections end.
///
/// Without ALPN, a client must first send HTTP/2's preface (RFC 9113, 3.4), with which no other protocol begins. RFC 9113, 3.2
/// requires ALPN, but APNs serves clients without it, such as aioapns.
final class ProtocolGate: ChannelInboundHandler, RemovableChannelHandler {
    typealias InboundIn = ByteBuffer
    typealias InboundOut = ByteBuffer

    private let core: FakeCore
    private let number: Int
    private var state = State.handshake

    private enum State {
        case handshake
        /// The bytes that a client without ALPN has sent so far.
        case awaitingPreface(ByteBuffer)
        case over
    }

    private static let preface = Array("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".utf8)

    init(core: FakeCore, number: Int) {
        self.core = core
        self.number = number
    }

    func userInboundEventTriggered(context: ChannelHandlerContext, event: Any) {
        guard case .handshakeCompleted(let negotiated)? = event as? TLSUserEvent else {
            return context.fireUserInboundEventTriggered(event)
        }
        switch negotiated {
        case "h2": admit(context)
        case nil: state = .awaitingPreface(ByteBuffer())
        case let other?: refuse(context, "it offers \(other)")
        }
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        guard case .awaitingPreface(var bytes) = state else { return context.fireChannelRead(data) }
        var news = unwrapInboundIn(data)
        bytes.writeBuffer(&news)
        guard bytes.readableBytesView.starts(with: Self.preface.prefix(bytes.readableBytes)) else {
            return refuse(context, "it has not sent HTTP/2's preface")
        }
        state = .awaitingPreface(bytes)
        if bytes.readableBytes >= Self.preface.count { admit(context, shown: bytes) }
    }

    /// - Parameter shown: Bytes that were read here and belong to the next handler.
    private func admit(_ context: ChannelHandlerContext, shown: ByteBuffer? = nil) {
        state = .over
        do {
            let pipeline = context.pipeline.syncOperations
            let connection = FakeConnection(core: core, number: number, certificate: try certificate(context))
            try pipeline.addHandlers([WriteGathering(), http2(), connection])
            if let shown { context.fireChannelRead(wrapInboundOut(shown)) }
            pipeline.removeHandler(context: context, promise: nil)
        } catch {
            errorCaught(context: context, error: error)
        }
    }

    private func refuse(_ context: ChannelHandlerContext, _ why: String) {
        state = .over
        core.records.fault(ProtocolRefused(why: why))
        context.close(promise: nil)
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        core.records.fault(error)
        context.close(promise: nil)
    }

    // Read after the handshake: in a resumed session, the client does not present its certificate again.
    private func certificate(_ context: ChannelHandlerContext) throws -> PeerCertificate {
        guard let authority = core.clientAuthority,
            let certificate = try context.pipeline.syncOperations.handler(type: TLSHandler.self).peerCertificate
        else { return .none }
        defer { X509_free(certificate) }
        return PeerCertificate(certificate, authority: authority)
    }

    private func http2() -> NIOHTTP2Handler {
        var connection = NIOHTTP2Handler.ConnectionConfiguration()
        var first = core.settings.withLock { $0 }
        if core.options.provesFirst { first.maximumStreams = 1 }
        connection.initialSettings = first.frame + [HTTP2Setting(parameter: .maxHeaderListSize, value: 16_384)]
        // Requests are checked by `Validation`; answers may be wrong on purpose.
        connection.headerBlockValidation = .disabled
        connection.contentLengthValidation = .disabled
        // Clients under test may send any number of PINGs.
        connection.maximumSequentialEmptyDataFrames = 1000
        connection.maximumConnectionGlitches = .max
        connection.maximumRecentlyResetStreams = 1000
        connection.controlFrameRateLimit.maximumCount = 1_000_000
        var stream = NIOHTTP2Handler.StreamConfiguration()
        stream.streamResetFrameRateLimit.maximumCount = core.options.maximumResets
        stream.streamErrorRateLimit.maximumCount = 1_000_000
        return NIOHTTP2Handler(mode: .server, connectionConfiguration: connection, streamConfiguration: stream)
    }
}

struct ProtocolRefused: Error, CustomStringConvertible {
    let why: String
    var description: String { "the client does not speak h2: \(why)" }
}

/// Joins all writes before a flush into one. TLS makes a record of each write, and a frame of an answer has some 50 bytes. Without
/// this, encrypting and decrypting records would be most of the work of both sides.
final class WriteGathering: ChannelOutboundHandler {
    typealias OutboundIn = ByteBuffer
    typealias OutboundOut = ByteBuffer

    private var gathered: ByteBuffer?
    private var promise: EventLoopPromise<Void>?

    func write(context: ChannelHandlerContext, data: NIOAny, promise: EventLoopPromise<Void>?) {
        var bytes = unwrapOutboundIn(data)
        if gathered == nil {
            gathered = context.channel.allocator.buffer(capacity: 16_384)
        }
        gathered?.writeBuffer(&bytes)
        if let promise {
            if let earlier = self.promise {
                earlier.futureResult.cascade(to: promise)
            } else {
                self.promise = promise
            }
        }
    }

    func flush(context: ChannelHandlerContext) {
        release(context)
        context.flush()
    }

    func close(context: ChannelHandlerContext, mode: CloseMode, promise: EventLoopPromise<Void>?) {
        release(context)
        context.close(mode: mode, promise: promise)
    }

    func handlerRemoved(context: ChannelHandlerContext) {
        promise?.fail(ChannelError.ioOnClosedChannel)
        promise = nil
    }

    private func release(_ context: ChannelHandlerContext) {
        guard let bytes = gathered else { return }
        gathered = nil
        context.write(wrapOutboundOut(bytes), promise: promise)
        promise = nil
    }
}
