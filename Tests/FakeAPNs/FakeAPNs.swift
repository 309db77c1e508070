import Foundation
import NIOCore
import NIOPosix
import Synchronization

/// A server that speaks APNs' protocol over real HTTP/2 and TLS, checks requests as APNs does, and answers from a script.
///
/// ```swift
/// let apns = try FakeAPNs.start(FakeOptions(try TestAuthority())) { request in
///     request.ordinal % 10 == 0 ? .refused(429, "TooManyRequests") : nil
/// }
/// defer { apns.stop() }
/// ```
public final class FakeAPNs: Sendable {
    /// Called for each request that has passed the checks, on the thread of its connection; it must not block. If it returns nil,
    /// the response is 410 for a dead token, and 200 otherwise.
    public typealias Answer = @Sendable (FakeRequest) -> FakeAnswer?

    /// The port on which the server listens.
    public let port: Int
    /// The requests and connections so far.
    public var records: FakeRecords { core.records }
    /// The dead tokens.
    public var deaths: Deaths { core.deaths }

    /// Milliseconds since the Unix epoch, by the server's clock.
    public var startedAt: Int64 { core.startedAt }

    let core: FakeCore
    private let group: MultiThreadedEventLoopGroup
    private let listener: any Channel
    private let isStopped = Atomic(false)

    private init(core: FakeCore, group: MultiThreadedEventLoopGroup, listener: any Channel) {
        self.core = core
        self.group = group
        self.listener = listener
        port = listener.localAddress?.port ?? 0
    }

    deinit {
        if !isStopped.load(ordering: .acquiring) { group.shutdownGracefully { _ in } }
    }

    /// Starts a server, which listens when this returns.
    ///
    /// - Throws: If the certificate, the key or the CA cannot be read, or the port is taken.
    public static func start(_ options: FakeOptions, answer: @escaping Answer = { _ in nil }) throws -> FakeAPNs {
        let core = try FakeCore(options, answer: answer)
        let group = MultiThreadedEventLoopGroup(numberOfThreads: options.threads)
        do {
            return FakeAPNs(core: core, group: group, listener: try core.bind(on: group).wait())
        } catch {
            try? group.syncShutdownGracefully()
            throw error
        }
    }

    /// Starts a server, which listens when this returns.
    public static func start(_ options: FakeOptions, answer: @escaping Answer = { _ in nil }) async throws -> FakeAPNs {
        let core = try FakeCore(options, answer: answer)
        let group = MultiThreadedEventLoopGroup(numberOfThreads: options.threads)
        do {
            return FakeAPNs(core: core, group: group, listener: try await core.bind(on: group).get())
        } catch {
            try? await group.shutdownGracefully()
            throw error
        }
    }

    /// Ends all connections at once. The records stay readable.
    public func stop() {
        if isStopped.exchange(true, ordering: .acquiringAndReleasing) { return }
        try? group.syncShutdownGracefully()
    }

    /// Ends all connections at once. The records stay readable.
    public func stop() async {
        if isStopped.exchange(true, ordering: .acquiringAndReleasing) { return }
        try? await group.shutdownGracefully()
    }

    /// Closes the open connections without GOAWAY. New ones are accepted.
    public func dropConnections() {
        for connection in core.connections.withLock({ Array($0.values) }) { connection.dropped() }
    }
}

/// The state that all connections of a server share.
final class FakeCore: Sendable {
    let options: FakeOptions
    let answer: FakeAPNs.Answer
    let records: FakeRecords
    let deaths = Deaths()
    let channels = FakeChannels()
    let tokens: VerifiedTokens
    let validation: Validation
    let startedAt: Int64
    let requests = Atomic(0)
    let connections = Mutex<[ObjectIdentifier: any Channel]>([:])
    /// The settings with which connections begin.
    let settings: Mutex<FakeSettings>
    /// PEM.
    let clientAuthority: String?

    private let tls: TLSContext

    init(_ options: FakeOptions, answer: @escaping FakeAPNs.Answer) throws {
        self.options = options
        self.answer = answer
        records = FakeRecords(options.records)
        tokens = VerifiedTokens(keys: options.signingKeys)
        validation = Validation(
            topics: options.topics, knownTokens: options.knownTokens.map { Set($0.map { $0.lowercased() }) })
        startedAt = options.now()
        var settings = FakeSettings(maximumStreams: options.maximumStreams, initialWindow: 65_535)
        for first in options.settings where first.after == .zero { settings.merge(first) }
        self.settings = Mutex(settings)
        clientAuthority = try options.clientAuthority.map { try String(contentsOfFile: $0, encoding: .utf8) }

        // A bad certificate gets a 403 for each request, not a TLS alert: see `ProtocolGate`.
        tls = try TLSContext(
            certificate: options.certificate, key: options.privateKey,
            asksForCertificates: options.clientAuthority != nil)
    }

    func bind(on group: MultiThreadedEventLoopGroup) -> EventLoopFuture<any Channel> {
        ServerBootstrap(group: group)
            .serverChannelOption(.backlog, value: 256)
            .serverChannelOption(.socketOption(.so_reuseaddr), value: 1)
            .childChannelOption(.tcpOption(.tcp_nodelay), value: 1)
            .childChannelOption(.maxMessagesPerRead, value: 4)
            .childChannelInitializer { channel in
                channel.eventLoop.makeCompletedFuture { try self.accept(channel) }
            }
            .bind(host: options.host, port: options.port)
    }

    private func accept(_ channel: any Channel) throws {
        let number = records.connected()
        let identity = ObjectIdentifier(channel)
        connections.withLock { $0[identity] = channel }
        channel.closeFuture.whenComplete { _ in
            self.connections.withLock { $0[identity] = nil }
            self.records.disconnected()
        }
        try channel.pipeline.syncOperations.addHandlers([TLSHandler(tls), ProtocolGate(core: self, number: number)])
    }
}

extension Channel {
    /// Closes the connection below TLS, without close_notify.
    func dropped() {
        eventLoop.execute {
            guard let tls = try? self.pipeline.syncOperations.context(handlerType: TLSHandler.self) else {
                return self.close(promise: nil)
            }
            tls.close(promise: nil)
        }
    }
}
