internal import CCurl
public import TokenModel

/// Tries whether a connection to a server works: the proxy, TLS with both certificates, and HTTP/2. It sends no request, so no device
/// gets anything, and APNs sees no provider token.
public struct ConnectionProbe {
    private let server: PushServer
    private let identity: PushIdentity
    private let options: PushClientOptions

    /// - Parameter identity: Only its certificate is used.
    public init(of environment: Environment, _ identity: PushIdentity, _ options: PushClientOptions) {
        server = options.server(of: environment)
        self.identity = identity
        self.options = options
    }

    /// Connects, and waits for the first frame of the server. With TLS 1.3, a server refuses a certificate only after the handshake.
    ///
    /// Blocks for at most the time to connect and the time for a response, together.
    ///
    /// - Returns: Nil if it works; otherwise why not, in one line.
    public func failure() -> String? {
        let multi = MultiHandle()
        do {
            let tls = try TLSConnection(1, to: server, identity: identity, options: options, trace: nil)
            if let message = multi.add(tls) { return message }
            defer { multi.remove(tls) }
            return try failure(of: Link(tls, nil), multi)
        } catch let error as TLSConnection.Failure {
            return error.message
        } catch let error as Link.Lost {
            return error.message
        } catch {
            return "\(error)"
        }
    }

    private func failure(of link: Link, _ multi: MultiHandle) throws -> String? {
        let buffer = ReadBuffer()
        let deadline = ContinuousClock.now + options.connectTimeout + options.answerTimeout
        while ContinuousClock.now < deadline {
            for (_, code) in multi.connect() {
                if code != CURLE_OK { return link.tls.refusal(code) }
                try link.open(buffer, host: server.host)
            }
            if link.isOpen {
                let written = link.flush()
                try link.read(buffer)
                for event in link.session.takeEvents() {
                    switch event {
                    case .settings:
                        link.session.leave()
                        _ = link.flush()
                        return nil
                    case .goAway(_, let goAway): return goAway.message
                    case .head, .answer, .closed: break
                    }
                }
                if let lost = written.lost { throw lost }
            }
            var sockets = link.isOpen ? [link.poll] : []
            multi.wait(for: &sockets, milliseconds: 100)
            if let socket = sockets.first { link.polled(socket.revents) }
        }
        return "the server has sent nothing within \(options.answerTimeout) of the handshake"
    }
}
