import COpenSSL
public import NIOCore
import NIOTLS

/// What all connections of a server or a client have in common.
///
/// The tests use OpenSSL, as the daemon does. swift-nio-ssl would bring a TLS library of its own, which takes longer to compile than
/// everything else together.
public final class TLSContext: @unchecked Sendable {  // OpenSSL locks it.
    fileprivate let handle: OpaquePointer
    fileprivate let isServer: Bool

    private init(isServer: Bool) throws {
        guard let handle = SSL_CTX_new(isServer ? TLS_server_method() : TLS_client_method()) else {
            throw TLSFailure("no context")
        }
        self.handle = handle
        self.isServer = isServer
        SSL_CTX_ctrl(handle, SSL_CTRL_SET_MIN_PROTO_VERSION, Int(TLS1_2_VERSION), nil)
    }

    deinit { SSL_CTX_free(handle) }

    /// For a server that speaks h2.
    ///
    /// - Parameters:
    ///   - certificate: Path of the certificate and those of its CAs, PEM.
    ///   - key: Path of its private key, PEM, not encrypted.
    ///   - asksForCertificates: Whether it asks clients for a certificate. It takes any, and none.
    /// - Throws: If a file cannot be read.
    public convenience init(certificate: String, key: String, asksForCertificates: Bool = false) throws {
        try self.init(isServer: true)
        guard SSL_CTX_use_certificate_chain_file(handle, certificate) == 1,
            SSL_CTX_use_PrivateKey_file(handle, key, SSL_FILETYPE_PEM) == 1
        else { throw TLSFailure("\(certificate) or \(key)") }
        SSL_CTX_set_alpn_select_cb(
            handle,
            { _, chosen, length, offered, count, _ in
                var rest = UnsafeBufferPointer(start: offered, count: Int(count))[...]
                while let size = rest.popFirst().map(Int.init), size <= rest.count {
                    if rest.prefix(size).elementsEqual("h2".utf8), let offered {
                        chosen?.pointee = offered + rest.startIndex
                        length?.pointee = UInt8(size)
                        return SSL_TLSEXT_ERR_OK
                    }
                    rest = rest.dropFirst(size)
                }
                return SSL_TLSEXT_ERR_NOACK
            }, nil)
        if asksForCertificates {
            SSL_CTX_set_verify(handle, SSL_VERIFY_PEER) { _, _ in 1 }
            // OpenSSL resumes no session without it.
            SSL_CTX_set_session_id_context(handle, [1], 1)
        }
    }

    /// For a client of `localhost`.
    ///
    /// - Parameters:
    ///   - authority: Path of the CA that it trusts, PEM.
    ///   - protocols: What it offers by ALPN. If empty, it sends no ALPN.
    public convenience init(trusting authority: String, protocols: [String]) throws {
        try self.init(isServer: false)
        guard SSL_CTX_load_verify_locations(handle, authority, nil) == 1 else { throw TLSFailure(authority) }
        SSL_CTX_set_verify(handle, SSL_VERIFY_PEER, nil)
        let list = protocols.flatMap { [UInt8($0.utf8.count)] + Array($0.utf8) }
        if !list.isEmpty { SSL_CTX_set_alpn_protos(handle, list, UInt32(list.count)) }
    }
}

/// What OpenSSL says.
struct TLSFailure: Error, CustomStringConvertible {
    let description: String

    init(_ what: String) {
        var text = [CChar](repeating: 0, count: 256)
        ERR_error_string_n(ERR_get_error(), &text, text.count)
        description =
            "TLS, \(what): \(String(decoding: text.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self))"
    }
}

/// TLS on one connection. The handler after it sees `TLSUserEvent.handshakeCompleted`.
///
/// OpenSSL reads from one buffer and writes to another; this handler fills and empties them.
public final class TLSHandler: ChannelDuplexHandler {
    public typealias InboundIn = ByteBuffer
    public typealias InboundOut = ByteBuffer
    public typealias OutboundIn = ByteBuffer
    public typealias OutboundOut = ByteBuffer

    private let tls: OpaquePointer
    private let (arrived, leaving): (OpaquePointer, OpaquePointer)
    private let context: TLSContext
    private var isUp = false
    /// Whether the handshake failed, or either side has ended the session.
    private var hasEnded = false
    /// Whether it only waits for the peer to close, too.
    private var isClosing = false
    /// What is written before the handshake is over.
    private var early: [(bytes: ByteBuffer, promise: EventLoopPromise<Void>?)] = []

    /// The most bytes of a record.
    private static let record = 16_384

    public init(_ context: TLSContext) {
        self.context = context
        // Null for want of memory only.
        tls = SSL_new(context.handle)!
        (arrived, leaving) = (BIO_new(BIO_s_mem())!, BIO_new(BIO_s_mem())!)
        // Both belong to the session from now on.
        SSL_set_bio(tls, arrived, leaving)
        if context.isServer {
            SSL_set_accept_state(tls)
        } else {
            SSL_set_connect_state(tls)
            SSL_set1_host(tls, "localhost")
            "localhost".withCString { name in
                _ = SSL_ctrl(
                    tls, SSL_CTRL_SET_TLSEXT_HOSTNAME, Int(TLSEXT_NAMETYPE_host_name),
                    UnsafeMutableRawPointer(mutating: name))
            }
        }
    }

    deinit { SSL_free(tls) }

    /// The client's certificate, to be freed with `X509_free`; nil without one. A resumed session still has it.
    var peerCertificate: OpaquePointer? { SSL_get1_peer_certificate(tls) }

    public func handlerAdded(context: ChannelHandlerContext) {
        if context.channel.isActive { advance(context) }
    }

    public func handlerRemoved(context: ChannelHandlerContext) {
        for write in early { write.promise?.fail(ChannelError.ioOnClosedChannel) }
        early = []
    }

    public func channelActive(context: ChannelHandlerContext) {
        context.fireChannelActive()
        advance(context)
    }

    public func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        let bytes = unwrapInboundIn(data)
        bytes.withUnsafeReadableBytes { _ = BIO_write(arrived, $0.baseAddress, Int32($0.count)) }
        advance(context)
    }

    public func write(context: ChannelHandlerContext, data: NIOAny, promise: EventLoopPromise<Void>?) {
        let bytes = unwrapOutboundIn(data)
        if hasEnded {
            promise?.fail(ChannelError.outputClosed)
        } else if !isUp {
            early.append((bytes, promise))
        } else {
            encrypt(bytes)
            context.write(wrapOutboundOut(encrypted(context)), promise: promise)
        }
    }

    /// Says close_notify and reads until the peer has closed, for five seconds at most. Closing a socket with unread bytes resets the
    /// connection, and the peer would lose what was sent last.
    public func close(context: ChannelHandlerContext, mode: CloseMode, promise: EventLoopPromise<Void>?) {
        guard mode != .input, isUp, !hasEnded else { return context.close(mode: mode, promise: promise) }
        hasEnded = true
        SSL_shutdown(tls)
        send(context)
        if mode == .output { return context.close(mode: mode, promise: promise) }
        isClosing = true
        context.channel.closeFuture.cascade(to: promise)
        context.eventLoop.assumeIsolated().scheduleTask(in: .seconds(5)) { context.close(promise: nil) }
    }

    /// A socket's errors after the end are no faults: a peer may close it with unread bytes.
    public func errorCaught(context: ChannelHandlerContext, error: any Error) {
        if hasEnded { context.close(promise: nil) } else { context.fireErrorCaught(error) }
    }

    /// Continues the handshake, or passes on what has arrived.
    private func advance(_ context: ChannelHandlerContext) {
        if !isUp, !handshake(context) { return }
        while true {
            ERR_clear_error()
            var bytes = context.channel.allocator.buffer(capacity: Self.record)
            var result: Int32 = 0
            bytes.writeWithUnsafeMutableBytes(minimumWritableBytes: Self.record) { space in
                result = SSL_read(tls, space.baseAddress, Int32(space.count))
                return Int(max(0, result))
            }
            if result > 0 {
                if !isClosing { context.fireChannelRead(wrapInboundOut(bytes)) }
                continue
            }
            switch SSL_get_error(tls, result) {
            case SSL_ERROR_WANT_READ: return send(context)
            // The peer's close_notify.
            case SSL_ERROR_ZERO_RETURN:
                if !hasEnded {
                    hasEnded = true
                    SSL_shutdown(tls)
                    send(context)
                }
                return context.close(promise: nil)
            default: return isClosing ? context.close(promise: nil) : fail(context)
            }
        }
    }

    /// - Returns: Whether the handshake is over.
    private func handshake(_ context: ChannelHandlerContext) -> Bool {
        if hasEnded { return false }
        ERR_clear_error()
        let result = SSL_do_handshake(tls)
        let error = result == 1 ? SSL_ERROR_NONE : SSL_get_error(tls, result)
        // Even a failure may have something to say.
        send(context)
        if error == SSL_ERROR_WANT_READ { return false }
        if error != SSL_ERROR_NONE {
            fail(context)
            return false
        }
        isUp = true
        var (chosen, length): (UnsafePointer<UInt8>?, UInt32) = (nil, 0)
        SSL_get0_alpn_selected(tls, &chosen, &length)
        let negotiated = chosen.map {
            String(decoding: UnsafeBufferPointer(start: $0, count: Int(length)), as: UTF8.self)
        }
        context.fireUserInboundEventTriggered(TLSUserEvent.handshakeCompleted(negotiatedProtocol: negotiated))
        for write in early {
            encrypt(write.bytes)
            context.write(wrapOutboundOut(encrypted(context)), promise: write.promise)
        }
        early = []
        context.flush()
        return true
    }

    private func fail(_ context: ChannelHandlerContext) {
        if hasEnded { return }
        hasEnded = true
        context.fireErrorCaught(TLSFailure(isUp ? "read" : "handshake"))
    }

    /// A memory buffer takes everything at once.
    private func encrypt(_ bytes: ByteBuffer) {
        bytes.withUnsafeReadableBytes { if !$0.isEmpty { SSL_write(tls, $0.baseAddress, Int32($0.count)) } }
    }

    private func encrypted(_ context: ChannelHandlerContext) -> ByteBuffer {
        let count = BIO_ctrl_pending(leaving)
        var bytes = context.channel.allocator.buffer(capacity: count)
        bytes.writeWithUnsafeMutableBytes(minimumWritableBytes: count) { space in
            max(0, Int(BIO_read(leaving, space.baseAddress, Int32(count))))
        }
        return bytes
    }

    private func send(_ context: ChannelHandlerContext) {
        if BIO_ctrl_pending(leaving) > 0 { context.writeAndFlush(wrapOutboundOut(encrypted(context)), promise: nil) }
    }
}
