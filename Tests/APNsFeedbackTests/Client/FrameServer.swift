import FakeAPNs
import NIOCore
import NIOPosix
import Synchronization

/// A server that writes whatever a test wants: a script returns the bytes that follow each of the client's frames.
final class FrameServer: Sendable {
    enum Reply {
        case bytes([UInt8])
        /// Closes the connection, beneath HTTP/2.
        case close
        /// Reads no more, until `readAgain`.
        case stopReading
    }

    /// The client's frame, and the number of its connection from 1. Called on the thread of all connections.
    typealias Script = @Sendable (_ connection: Int, _ frame: FrameReader.Frame) -> [Reply]

    struct Seen: Sendable {
        var connection: Int
        var frame: FrameReader.Frame
    }

    private let group: MultiThreadedEventLoopGroup
    private let listener: any Channel

    var port: Int { listener.localAddress?.port ?? 0 }
    /// The client's frames so far.
    var frames: [Seen] { log.seen.withLock { $0 } }
    var connections: Int { frames.map(\.connection).max() ?? 0 }

    /// How often a whole request arrived.
    var requests: Int { frames.count { $0.frame.endsStream } }

    private final class Log: Sendable {
        let seen = Mutex<[Seen]>([])
        let channels = Mutex<[any Channel]>([])
        let connections = Atomic(0)
    }
    private let log: Log

    /// Listens when it returns. After the client's SETTINGS the server sends its own, and a window for the connection that is never used up.
    ///
    /// - Parameter settings: The server's first frame.
    static func start(
        _ files: TestAuthority, settings: [(Frames.Setting, UInt32)] = [(.mostStreams, 1000)], script: @escaping Script
    ) throws -> FrameServer {
        let tls = try TLSContext(certificate: files.server.certificate, key: files.server.key)
        let (group, log, first) = (
            MultiThreadedEventLoopGroup(numberOfThreads: 1), Log(),
            Frames.settings(settings) + Frames.windowUpdate(0, by: 1 << 30)
        )
        let listener = try ServerBootstrap(group: group)
            .childChannelOption(.tcpOption(.tcp_nodelay), value: 1)
            .childChannelInitializer { channel in
                channel.eventLoop.makeCompletedFuture {
                    log.channels.withLock { $0.append(channel) }
                    let number = log.connections.add(1, ordering: .relaxed).newValue
                    try channel.pipeline.syncOperations.addHandlers([
                        TLSHandler(tls),
                        Speaker { frame in
                            log.seen.withLock { $0.append(Seen(connection: number, frame: frame)) }
                            let greeting = frame.kind == .settings && !frame.isAcknowledgement
                            return (greeting ? [.bytes(first + Frames.settingsAcknowledged)] : [])
                                + script(number, frame)
                        },
                    ])
                }
            }
            .bind(host: "127.0.0.1", port: 0).wait()
        return FrameServer(group, listener, log)
    }

    private init(_ group: MultiThreadedEventLoopGroup, _ listener: any Channel, _ log: Log) {
        self.group = group
        self.listener = listener
        self.log = log
    }

    /// Goes on reading on all connections.
    func readAgain() {
        for channel in log.channels.withLock({ $0 }) { channel.setOption(.autoRead, value: true).whenComplete { _ in } }
    }

    func stop() {
        try? group.syncShutdownGracefully()
    }
}

private final class Speaker: ChannelInboundHandler {
    typealias InboundIn = ByteBuffer
    typealias OutboundOut = ByteBuffer
    private var reader = FrameReader()
    private let script: (FrameReader.Frame) -> [FrameServer.Reply]

    init(script: @escaping (FrameReader.Frame) -> [FrameServer.Reply]) {
        self.script = script
    }

    func channelRead(context: ChannelHandlerContext, data: NIOAny) {
        for frame in reader.add(unwrapInboundIn(data).readableBytesView) {
            for reply in script(frame) {
                switch reply {
                case .bytes(let bytes): context.writeAndFlush(wrapOutboundOut(ByteBuffer(bytes: bytes)), promise: nil)
                case .close: context.close(promise: nil)
                case .stopReading: try? context.channel.syncOptions?.setOption(.autoRead, value: false)
                }
            }
        }
    }

    func errorCaught(context: ChannelHandlerContext, error: any Error) {
        context.close(promise: nil)
    }
}
