import NIOCore
import NIOHTTP2
import NIOSSL
import NIOTLS

/// Waits for the end of the TLS handshake: who speaks h2 gets the rest of the pipeline, others get the end.
final class ProtocolGate: ChannelInboundHandler, RemovableChannelHandler {
    typealias InboundIn = ByteBuffer

    private let core: FakeCore
    private let number: Int

    init(core: FakeCore, number: Int) {
        self.core = core
        self.number = number
    }

    func userInboundEventTriggered(context: ChannelHandlerContext, event: Any) {
        guard case .handshakeCompleted(let negotiated)? = event as? TLSUserEvent else {
            return context.fireUserInboundEventTriggered(event)
        }
        guard negotiated == "h2" else {
            core.records.fault(ProtocolRefused(offered: negotiated))
            return context.close(promise: nil)
        }
        do {
            let pipeline = context.pipeline.syncOperations
            let connection = FakeConnection(core: core, number: number, certificate: try certificate(context))
            try pipeline.addHandlers([WriteGathering(), http2(), connection])
            pipeline.removeHandler(context: context, promise: nil)
        } catch {
            errorCaught(context: context, error: error)
        }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        core.records.fault(error)
        context.close(promise: nil)
    }

    // Asked after the handshake: in a resumed session the certificate is not presented again.
    private func certificate(_ context: ChannelHandlerContext) throws -> PeerCertificate {
        guard let authority = core.clientAuthority,
            let certificate = try context.pipeline.syncOperations.nioSSL_peerCertificate()
        else { return .none }
        return PeerCertificate(certificate, authority: authority)
    }

    private func http2() -> NIOHTTP2Handler {
        var connection = NIOHTTP2Handler.ConnectionConfiguration()
        connection.initialSettings = [
            HTTP2Setting(
                parameter: .maxConcurrentStreams, value: core.options.provesFirst ? 1 : core.options.maximumStreams),
            HTTP2Setting(parameter: .maxHeaderListSize, value: 16_384),
        ]
        // Requests are checked by `Validation`; answers may be wrong on purpose.
        connection.headerBlockValidation = .disabled
        connection.contentLengthValidation = .disabled
        // Clients under test may ping as they like.
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
    let offered: String?
    var description: String { "the client does not speak h2, but \(offered ?? "nothing that was agreed upon")" }
}

/// Makes one write of all that is written before a flush. TLS makes a record of each write, and a frame of an answer has
/// some 50 bytes: without this, sealing and opening records would be most of the work of both sides.
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
