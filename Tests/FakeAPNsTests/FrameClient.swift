import FakeAPNs
import NIOCore
import NIOHPACK
import NIOHTTP2
import NIOPosix
import Synchronization

/// A client that shows each HTTP/2 frame. Tests of whole requests use curl, which is independent of NIO.
final class FrameClient: Sendable {
    private let channel: any Channel
    private let frames: FrameLog

    /// - Parameter protocols: What it offers by ALPN. If empty, it sends no ALPN.
    static func connect(to apns: FakeAPNs, protocols: [String] = ["h2"]) async throws -> FrameClient {
        let tls = try TLSContext(trusting: Fixture.authority.certificate, protocols: protocols)
        let frames = FrameLog()
        // Some answers are wrong on purpose.
        let lax = NIOHTTP2Handler.ConnectionConfiguration.lax
        let channel = try await ClientBootstrap(group: MultiThreadedEventLoopGroup.singleton)
            .channelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    try channel.pipeline.syncOperations.addHandlers(
                        TLSHandler(tls), FrameTap(frames), NIOHTTP2Handler(mode: .client, connectionConfiguration: lax),
                        FrameReader(frames))
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
    private let pings = Atomic<UInt64>(0)

    /// Sends a whole request on a new stream, and returns the stream.
    func post(token: String = CurlRequest.token, authorization: String) async throws -> Int {
        try await post([(token, nil)], authorization: authorization)[0]
    }

    /// Sends requests, all of them before it reads anything more, and returns their streams.
    func post(_ requests: [(token: String, id: String?)], authorization: String) async throws -> [Int] {
        try await channel.eventLoop.submit { [self] in
            requests.map { token, id in
                let stream = nextStream.add(2, ordering: .relaxed).oldValue
                var headers: HPACKHeaders = [
                    ":method": "POST", ":scheme": "https", ":authority": "localhost", ":path": "/3/device/\(token)",
                    "authorization": authorization, "apns-topic": "com.example.app",
                ]
                if let id { headers.add(name: "apns-id", value: id) }
                let streamID = HTTP2StreamID(stream)
                channel.write(HTTP2Frame(streamID: streamID, payload: .headers(.init(headers: headers))), promise: nil)
                let body = ByteBuffer(string: CurlRequest().body)
                let data = HTTP2Frame.FramePayload.data(.init(data: .byteBuffer(body), endStream: true))
                channel.write(HTTP2Frame(streamID: streamID, payload: data), promise: nil)
                // One by one, since NIO sends the bodies that wait in any order.
                channel.flush()
                return stream
            }
        }.get()
    }

    /// The status of the first response on that stream, which may be informational.
    func status(_ stream: Int) async throws -> String? {
        try await frames.first { frame in
            guard frame.streamID == HTTP2StreamID(stream), case .headers(let headers) = frame.payload else {
                return nil
            }
            return .some(headers.headers.first(name: ":status"))
        }
    }

    /// The frames on that stream up to END_STREAM or RST_STREAM, in order, each as a text.
    func story(_ stream: Int) async throws -> [String] {
        var told: [String] = []
        return try await frames.first { frame in
            guard frame.streamID == HTTP2StreamID(stream) else { return nil }
            switch frame.payload {
            case .headers(let headers):
                let fields = headers.headers.filter { $0.name != "apns-id" }.map { "\($0.name) \($0.value)" }
                told.append((fields + (headers.endStream ? ["END"] : [])).joined(separator: ", "))
                return headers.endStream ? told : nil
            case .data(let data):
                if case .byteBuffer(let bytes) = data.data {
                    told.append("\(String(buffer: bytes))\(data.endStream ? " END" : "")")
                }
                return data.endStream ? told : nil
            case .rstStream(let code):
                told.append("RST \(code.networkCode)")
                return told
            default: return nil
            }
        }
    }

    /// Posts that many requests, the next before the last is answered. Returns the status of each.
    func statuses(of requests: Int, authorization: String) async throws -> [String?] {
        var streams: [Int] = []
        for _ in 0..<requests { streams.append(try await post(authorization: authorization)) }
        var statuses: [String?] = []
        for stream in streams { statuses.append(try await status(stream)) }
        return statuses
    }

    /// The types of the frames on that stream (RFC 9113, 6), once the connection has ended; also of frames that NIO hides.
    func types(_ stream: Int) async throws -> [UInt8] {
        try await closed()
        return frames.heads.filter { $0.stream == stream }.map(\.type)
    }

    /// The number of reads that brought frames on that stream, once the connection has ended.
    func pieces(_ stream: Int) async throws -> Int {
        try await closed()
        return Set(frames.heads.filter { $0.stream == stream }.map(\.read)).count
    }

    /// Returns when the server has handled everything that was sent before.
    func ping() async throws {
        let data = HTTP2PingData(withInteger: pings.add(1, ordering: .relaxed).newValue)
        channel.writeAndFlush(HTTP2Frame(streamID: .rootStream, payload: .ping(data, ack: false)), promise: nil)
        _ = try await frames.first { frame in
            if case .ping(data, ack: true) = frame.payload { return true } else { return nil }
        }
    }

    /// The error code with which that stream was reset.
    func reset(_ stream: Int) async throws -> HTTP2ErrorCode {
        try await frames.first { frame in
            guard frame.streamID == HTTP2StreamID(stream), case .rstStream(let code) = frame.payload else { return nil }
            return code
        }
    }

    /// The n-th value of SETTINGS_MAX_CONCURRENT_STREAMS from the server.
    func streamLimit(_ ordinal: Int) async throws -> Int {
        try await setting(.maxConcurrentStreams, ordinal)
    }

    /// The n-th value of that setting from the server.
    func setting(_ parameter: HTTP2SettingsParameter, _ ordinal: Int) async throws -> Int {
        var seen = 0
        return try await frames.first { frame in
            guard case .settings(.settings(let settings)) = frame.payload,
                let setting = settings.last(where: { $0.parameter == parameter })
            else { return nil }
            seen += 1
            return seen == ordinal ? setting.value : nil
        }
    }

    struct SignOff: Equatable {
        var last: Int
        var code: Int
        var data: String
    }

    /// The n-th GOAWAY.
    func goAway(_ ordinal: Int = 1) async throws -> SignOff {
        var seen = 0
        return try await frames.first { frame in
            guard case .goAway(let last, let code, let data) = frame.payload else { return nil }
            seen += 1
            guard seen == ordinal else { return nil }
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

/// All frames so far, and the tasks that wait for more.
private final class FrameLog: Sendable {
    struct Ended: Error {}
    private struct State {
        var frames: [HTTP2Frame] = []
        var ended = false
        var waiting: [CheckedContinuation<Void, Never>] = []
        var heads: [FrameHead] = []
    }
    private let state = Mutex(State())

    var heads: [FrameHead] { state.withLock { $0.heads } }
    func append(_ head: FrameHead) { state.withLock { $0.heads.append(head) } }

    func append(_ frame: HTTP2Frame?) {
        let waiting = state.withLock { state in
            if let frame { state.frames.append(frame) } else { state.ended = true }
            defer { state.waiting = [] }
            return state.waiting
        }
        for continuation in waiting { continuation.resume() }
    }

    /// Waits for the first frame for which the closure returns a value, and returns that value. Each frame is passed once.
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

private struct FrameHead {
    var type: UInt8
    var stream: Int
    /// Reads are counted from 1.
    var read: Int
}

/// Records the head of each frame before NIO's HTTP/2 reads it.
private final class FrameTap: ChannelInboundHandler {
    typealias InboundIn = ByteBuffer
    private let log: FrameLog
    private var unread = ByteBuffer()
    private var reads = 0

    init(_ log: FrameLog) { self.log = log }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        var bytes = unwrapInboundIn(data)
        unread.writeBuffer(&bytes)
        reads += 1
        while let head = unread.getBytes(at: unread.readerIndex, length: 9) {
            let length = Int(head[0]) << 16 | Int(head[1]) << 8 | Int(head[2])
            guard unread.readableBytes >= 9 + length else { break }
            unread.moveReaderIndex(forwardBy: 9 + length)
            log.append(FrameHead(type: head[3], stream: head[5...8].reduce(0) { $0 << 8 | Int($1) }, read: reads))
        }
        context.fireChannelRead(data)
    }
}

extension NIOHTTP2Handler.ConnectionConfiguration {
    fileprivate static var lax: Self {
        var configuration = Self()
        configuration.headerBlockValidation = .disabled
        configuration.contentLengthValidation = .disabled
        return configuration
    }
}
