import FakeAPNs
import NIOCore
import NIOHPACK
import NIOHTTP2
import NIOPosix
import NIOSSL
import Synchronization

/// A client that shows the frames of HTTP/2 as they come. For requests curl is the better witness.
final class FrameClient: Sendable {
    private let channel: any Channel
    private let frames: FrameLog

    static func connect(to apns: FakeAPNs) async throws -> FrameClient {
        var tls = TLSConfiguration.makeClientConfiguration()
        tls.trustRoots = .file(Fixture.authority.certificate)
        tls.applicationProtocols = ["h2"]
        let context = try NIOSSLContext(configuration: tls)
        let frames = FrameLog()
        let channel = try await ClientBootstrap(group: MultiThreadedEventLoopGroup.singleton)
            .channelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    try channel.pipeline.syncOperations.addHandlers(
                        NIOSSLClientHandler(context: context, serverHostname: "localhost"),
                        NIOHTTP2Handler(mode: .client), FrameReader(frames))
                }
            }
            .connect(host: "127.0.0.1", port: apns.port).get()
        return FrameClient(channel, frames)
    }

    private init(_ channel: any Channel, _ frames: FrameLog) {
        self.channel = channel
        self.frames = frames
    }

    private let nextStream = Atomic(1)

    /// Sends a whole request on a stream of its own; answers the stream.
    func post(token: String = CurlRequest.token, authorization: String) async throws -> Int {
        let stream = nextStream.add(2, ordering: .relaxed).oldValue
        let headers: HPACKHeaders = [
            ":method": "POST", ":scheme": "https", ":authority": "localhost", ":path": "/3/device/\(token)",
            "authorization": authorization, "apns-topic": "com.example.app",
        ]
        let id = HTTP2StreamID(stream)
        channel.write(HTTP2Frame(streamID: id, payload: .headers(.init(headers: headers))), promise: nil)
        let body = ByteBuffer(string: CurlRequest().body)
        let data = HTTP2Frame(streamID: id, payload: .data(.init(data: .byteBuffer(body), endStream: true)))
        channel.writeAndFlush(data, promise: nil)
        return stream
    }

    /// The status of the answer on that stream.
    func status(_ stream: Int) async throws -> String? {
        try await frames.first { frame in
            guard frame.streamID == HTTP2StreamID(stream), case .headers(let headers) = frame.payload else {
                return nil
            }
            return .some(headers.headers.first(name: ":status"))
        }
    }

    /// The error code with which that stream was reset.
    func reset(_ stream: Int) async throws -> HTTP2ErrorCode {
        try await frames.first { frame in
            guard frame.streamID == HTTP2StreamID(stream), case .rstStream(let code) = frame.payload else { return nil }
            return code
        }
    }

    /// The so many-th SETTINGS_MAX_CONCURRENT_STREAMS that the server has told.
    func streamLimit(_ ordinal: Int) async throws -> Int {
        var seen = 0
        return try await frames.first { frame in
            guard case .settings(.settings(let settings)) = frame.payload,
                let limit = settings.last(where: { $0.parameter == .maxConcurrentStreams })
            else { return nil }
            seen += 1
            return seen == ordinal ? limit.value : nil
        }
    }

    struct SignOff: Equatable {
        var last: Int
        var code: Int
        var data: String
    }

    func goAway() async throws -> SignOff {
        try await frames.first { frame in
            guard case .goAway(let last, let code, let data) = frame.payload else { return nil }
            return SignOff(last: Int(last), code: code.networkCode, data: data.map { String(buffer: $0) } ?? "")
        }
    }

    /// Returns when the server has closed the connection.
    func closed() async throws {
        try await channel.closeFuture.get()
    }

    func close() async {
        try? await channel.close()
    }
}

/// All frames so far, and whoever waits for more.
private final class FrameLog: Sendable {
    struct Ended: Error {}
    private struct State {
        var frames: [HTTP2Frame] = []
        var ended = false
        var waiting: [CheckedContinuation<Void, Never>] = []
    }
    private let state = Mutex(State())

    func append(_ frame: HTTP2Frame?) {
        let waiting = state.withLock { state in
            if let frame { state.frames.append(frame) } else { state.ended = true }
            defer { state.waiting = [] }
            return state.waiting
        }
        for continuation in waiting { continuation.resume() }
    }

    /// What the first frame that has it has; waits for it. Each frame is shown once.
    func first<Value>(_ find: (HTTP2Frame) -> Value?) async throws -> Value {
        var shown = 0
        while true {
            let (frames, ended) = state.withLock { ($0.frames, $0.ended) }
            for frame in frames[shown...] {
                if let value = find(frame) { return value }
            }
            shown = frames.count
            if ended { throw Ended() }
            await withCheckedContinuation { continuation in
                let isNews = state.withLock { state in
                    if state.frames.count > shown || state.ended { return true }
                    state.waiting.append(continuation)
                    return false
                }
                if isNews { continuation.resume() }
            }
        }
    }
}

private final class FrameReader: ChannelInboundHandler {
    typealias InboundIn = HTTP2Frame
    private let log: FrameLog

    init(_ log: FrameLog) { self.log = log }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) { log.append(unwrapInboundIn(data)) }

    func channelInactive(context: ChannelHandlerContext) { log.append(nil) }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {}
}
