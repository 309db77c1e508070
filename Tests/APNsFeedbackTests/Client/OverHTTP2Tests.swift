import Dispatch
import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// The client over real HTTP/2 and TLS, to a fake APNs.
@Suite(.ownThread) struct `The client over HTTP/2` {
    let files: TestAuthority

    init() throws {
        files = try TestAuthority.ofClients.get()
    }

    private func server(
        _ change: (inout FakeOptions) -> Void = { _ in }, answer: @escaping FakeAPNs.Answer = { _ in nil }
    ) throws -> FakeAPNs {
        var options = FakeOptions(files)
        change(&options)
        return try FakeAPNs.start(options, answer: answer)
    }

    private func identity(key: (key: FakeSigningKey, file: String)? = nil) throws -> PushIdentity {
        let token = try files.providerToken(key: key)
        return PushIdentity(authorization: { token })
    }

    /// Sends them all, and stops the client.
    ///
    /// - Parameters:
    ///   - meanwhile: Called with each batch of outcomes.
    ///   - onThread: Called on the client's own thread when some have ended.
    private func send(
        _ requests: [PushRequest], to port: Int, identity: PushIdentity? = nil,
        _ change: (inout PushClientOptions) -> Void = { _ in },
        meanwhile: (PushClient, [PushOutcome]) -> Void = { _, _ in },
        onThread: @escaping @Sendable () -> Void = {}
    ) throws -> [PushOutcome] {
        var options = PushClientOptions(servers: [.production: PushServer(host: "localhost", port: port)])
        options.authorityFile = files.certificate
        change(&options)
        return sendAll(
            requests, try identity ?? self.identity(), options, meanwhile: meanwhile, onThread: onThread)
    }

    @Test func `2,000 answers of 410 on one connection: no stall, no second send`() throws {
        let apns = try server(answer: { .stale(at: 1_508_249_865_488 + Int64($0.ordinal)) })
        defer { apns.stop() }
        let outcomes = try send(requests(1...2000), to: apns.port) { $0.connections = 1 }
        #expect(outcomes.allSatisfy { status($0) == 410 && $0.sends == 1 })
        #expect(
            outcomes.allSatisfy { outcome in
                guard case .answered(let answer) = outcome.end else { return false }
                return answer.apnsID == outcome.request.id
                    && answer.body?.hasPrefix(#"{"reason":"Unregistered","timestamp":15082"#) == true
            })
        #expect(apns.records.requests == 2000 && apns.records.connections == 1)
    }

    @Test func `streams that have ended are not reset: a server that counts resets has nothing to count`() throws {
        let apns = try server(
            { $0.maximumResets = 1 }, answer: { $0.ordinal % 2 == 0 ? .refused(400, "BadTopic") : nil })
        defer { apns.stop() }
        let outcomes = try send(requests(1...2000), to: apns.port) { $0.connections = 1 }
        #expect(outcomes.allSatisfy { [200, 400].contains(status($0)) && $0.sends == 1 })
        #expect(apns.records.requests == 2000 && apns.records.connections == 1)
        #expect(apns.records.faults == [])
    }

    @Test func `requests that take too long are reset`() throws {
        // Of those that go together after the first, two get no answer.
        let apns = try server(
            { $0.maximumResets = 1 },
            answer: { 2...3 ~= $0.ordinal ? .never : .accepted.delayed(by: .milliseconds(10)) })
        defer { apns.stop() }
        let outcomes = try send(requests(1...4), to: apns.port) { $0.answerTimeout = .seconds(2) }
        #expect(outcomes.filter { status($0) == 200 }.count >= 2)
        // What comes over the connection that it has ended then may be a fault as well.
        #expect(
            apns.records.faults.first?.contains("ExcessiveRST") == true,
            "the second of them, which this server does not put up with")
    }

    @Test func `a request that was tried before is sent once`() throws {
        let apns = try server(answer: { _ in .reset(code: 2) })
        defer { apns.stop() }
        var again = requests(1...2)
        again[1].mayBeRepeated = false
        let outcomes = try send(again, to: apns.port)
        #expect(outcomes.allSatisfy { failure($0)?.mayHaveArrived == true })
        #expect(Set(outcomes.map { [$0.request.id: $0.sends] }) == [[again[0].id: 2], [again[1].id: 1]])
    }

    @Test func `after a standstill the client sends nothing, because another daemon may have taken its requests over`()
        throws
    {
        // All but the first and the thirtieth get no answer.
        let apns = try server(answer: { [1, 30].contains($0.ordinal) ? .accepted : .never })
        defer { apns.stop() }
        let hasStood = Atomic(false)
        let stand: @Sendable () -> Void = {
            if apns.records.requests >= 30, !hasStood.exchange(true, ordering: .relaxed) { sleep(3) }
        }
        let outcomes = try send(
            requests(1...50), to: apns.port,
            {
                $0.inFlight = 30
                $0.answerTimeout = .seconds(3)
                $0.standstill = .seconds(2)
            }, onThread: stand)
        #expect(outcomes.count { status($0) == 200 } == 2)
        let lost = outcomes.count { failure($0)?.mayHaveArrived == true && $0.sends == 1 }
        let withdrawn = outcomes.count { $0.end == .withdrawn && $0.sends == 0 }
        #expect(lost + withdrawn == 48 && withdrawn >= 18)
        #expect(apns.records.requests <= 32)
    }

    @Test func `answers that came during a standstill are read before any request counts as unanswered`() throws {
        let apns = try server(answer: {
            [1, 100].contains($0.ordinal) ? .accepted : FakeAnswer.accepted.delayed(by: .milliseconds(500))
        })
        defer { apns.stop() }
        let hasStood = Atomic(false)
        let stand: @Sendable () -> Void = {
            if apns.records.requests >= 100, !hasStood.exchange(true, ordering: .relaxed) { sleep(4) }
        }
        let outcomes = try send(requests(1...100), to: apns.port, { $0.answerTimeout = .seconds(2) }, onThread: stand)
        let stood = hasStood.load(ordering: .relaxed)
        #expect(stood)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
        #expect(apns.records.requests == 100)
    }

    @Test func `a connection without an answer gets one request, and no other connection is opened for the rest`()
        throws
    {
        let apns = try server({ $0.provesFirst = true })
        defer { apns.stop() }
        let outcomes = try send(requests(1...3000), to: apns.port) { $0.connections = 2 }
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
        #expect(apns.records.connections <= 2 && apns.records.faults == [])
        #expect(apns.records.mostStreams <= 500)
    }

    @Test func `both environments, each with its server, and a server that allows few streams`() throws {
        let (production, sandbox) = (try server({ $0.maximumStreams = 3 }), try server({ $0.sandbox = true }))
        defer {
            production.stop()
            sandbox.stop()
        }
        let mixed = (1...400).map {
            request($0, environment: $0 % 2 == 0 ? .production : .sandbox, token: String(format: "%064x", $0))
        }
        let outcomes = try send(mixed, to: production.port) {
            $0.servers[.sandbox] = PushServer(host: "localhost", port: sandbox.port)
        }
        #expect(outcomes.allSatisfy { status($0) == 200 })
        #expect(production.records.count(200) == 200 && sandbox.records.count(200) == 200)
        #expect(production.records.mostStreamsOfOneConnection <= 3 && production.records.connections <= 2)
        for outcome in outcomes {
            guard case .answered(let answer) = outcome.end else { continue }
            #expect((answer.uniqueID != nil) == (outcome.request.address.environment == .sandbox))
        }
    }

    // What is sent again -----------------------------------------------------------------------------------------------

    @Test func `an expired provider token is renewed once, and the request is repeated with the same apns-id`()
        throws
    {
        let apns = try server()
        defer { apns.stop() }
        let old = try files.providerToken(issuedAt: Int64(Date.now.timeIntervalSince1970) - 7200)
        let new = try files.providerToken()
        let current = Mutex(old)
        let renewals = Mutex(0)
        let identity = PushIdentity(
            authorization: { current.withLock { $0 } },
            renew: { refused in
                renewals.withLock { $0 += 1 }
                return current.withLock {
                    $0 = new
                    return refused == old
                }
            })
        let outcomes = try send(requests(1...200), to: apns.port, identity: identity)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends <= 2 })
        #expect(apns.records.count(403, "ExpiredProviderToken") >= 1 && renewals.withLock { $0 } >= 1)

        // A second refusal is an answer.
        let stubborn = PushIdentity(authorization: { old }, renew: { _ in true })
        let refused = try send(requests(1...1), to: apns.port, identity: stubborn)
        #expect(status(refused[0]) == 403 && refused[0].sends == 2)
    }

    @Test func `a token of another key than the connection's goes out again over a new connection`() throws {
        let apns = try server(answer: { $0.connection == 1 ? .refused(403, "UnrelatedKeyIdInToken") : nil })
        defer { apns.stop() }
        let outcomes = try send(requests(1...300), to: apns.port)
        #expect(outcomes.allSatisfy { status($0) == 200 })
        #expect(apns.records.connections <= 4)
        let always = try server(answer: { _ in .refused(403, "UnrelatedKeyIdInToken") })
        defer { always.stop() }
        let refused = try send(requests(1...1), to: always.port)
        #expect(status(refused[0]) == 403 && refused[0].sends == 2)
    }

    @Test func `requests above the last stream of a GOAWAY are repeated, and cost no send`() throws {
        let apns = try server(answer: {
            $0.ordinal == 1000 ? .goAway(.init(last: .thisNotProcessed, closing: .afterStreams)) : nil
        })
        defer { apns.stop() }
        let outcomes = try send(requests(1...2000), to: apns.port)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
        #expect(apns.records.connections == 2)
    }

    @Test func `the client backs off from a server that refuses every request, and no request counts as sent`() throws {
        let apns = try server(answer: { _ in .reset(code: 7) })
        defer { apns.stop() }
        let outcomes = try send(requests(1...3), to: apns.port)
        #expect(outcomes.allSatisfy { failure($0)?.kind == .backingOff && $0.sends == 0 }, "\(outcomes)")
        #expect(3...4 ~= apns.records.requests, "two connections may be refused at once")
    }

    @Test func `a request without an answer times out and is repeated once`() throws {
        let apns = try server(answer: { $0.token?.hasSuffix("5") == true ? .never : nil })
        defer { apns.stop() }
        let outcomes = try send(requests(1...22), to: apns.port) { $0.answerTimeout = .milliseconds(300) }
        let silent = outcomes.filter { $0.request.address.token.bytes.last! & 15 == 5 }
        #expect(silent.count == 2)
        #expect(
            silent.allSatisfy { failure($0)?.kind == .timeout && failure($0)?.mayHaveArrived == true && $0.sends == 2 })
        #expect(outcomes.count { status($0) == 200 } == 20)
    }

    @Test func `a connection that is dropped loses no request`() throws {
        let apns = try server()
        defer { apns.stop() }
        let drops = Mutex(0)
        let outcomes = try send(requests(1...3000), to: apns.port) { _ in
        } meanwhile: { _, outcomes in
            if outcomes.count > 0,
                drops.withLock({ drops in
                    drops += 1
                    return drops == 3
                })
            {
                apns.dropConnections()
            }
        }
        #expect(outcomes.allSatisfy { $0.sends <= 2 })
        #expect(outcomes.count { status($0) == 200 } >= 2500)
        #expect(outcomes.allSatisfy { status($0) == 200 || failure($0)?.mayHaveArrived == true })
    }

    @Test func `requests on a dead connection are repeated on another connection`() throws {
        let apns = try server(answer: { $0.connection == 1 ? .never : nil })
        defer { apns.stop() }
        let outcomes = try send(requests(1...5), to: apns.port) { $0.answerTimeout = .seconds(1) }
        #expect(outcomes.contains { status($0) == 200 && $0.sends == 2 })
        #expect(outcomes.allSatisfy { status($0) == 200 || failure($0)?.kind == .backingOff }, "\(outcomes)")
    }

    @Test func `a connection stays open if only one of its requests gets no answer`() throws {
        let apns = try server(answer: {
            $0.token?.hasSuffix("005") == true ? .never : FakeAnswer.accepted.delayed(by: .milliseconds(40))
        })
        defer { apns.stop() }
        let outcomes = try send(requests(1...250), to: apns.port) {
            $0.answerTimeout = .seconds(2)
            $0.inFlight = 3
            $0.connections = 1
        }
        #expect(outcomes.count { status($0) == 200 && $0.sends == 1 } == 249)
        #expect(apns.records.connections == 1)
    }

    @Test func `the client backs off from a server that accepts connections but never answers`() throws {
        let apns = try server(answer: { _ in .close })
        defer { apns.stop() }
        let outcomes = try send(requests(1...50), to: apns.port)
        #expect(outcomes.count { failure($0)?.kind == .backingOff } >= 40)
        #expect(apns.records.connections <= 5 && apns.records.requests <= 5)
    }

    @Test func `a 200 counts even if the stream then fails; an endless body is no response`() throws {
        let apns = try server(answer: { request in
            request.ordinal == 1
                ? .raw(
                    .init(
                        status: "200", headers: [("content-length", "900")], body: Array("{".utf8), end: .reset(code: 2)
                    ))
                : .raw(.init(status: "400", body: Array(repeating: 0x20, count: 3 << 20)))
        })
        defer { apns.stop() }
        let outcomes = try send(requests(1...2), to: apns.port) { $0.inFlight = 1 }
        #expect(outcomes.map(status) == [200, nil] && outcomes.map(\.sends) == [1, 2], "\(outcomes)")
    }

    @Test func `a stop does not wait for requests without a connection`() throws {
        // It never answers the handshake.
        let silent = try LoopbackListener()
        var options = PushClientOptions(servers: [.production: PushServer(host: "127.0.0.1", port: silent.port)])
        // It would end otherwise after that.
        options.connectTimeout = .seconds(30)
        let (news, over) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
        let client = PushClient(try identity(), options) { news.signal() }
        DispatchQueue.global().async {
            client.run()
            over.signal()
        }
        client.submit(requests(1...3))
        while client.state[.production].connectionsOpen == 0 { usleep(10_000) }
        client.stop(patience: .seconds(3600))
        over.wait()
        #expect(client.collect().map(\.end) == [.withdrawn, .withdrawn, .withdrawn])
    }

    @Test func `one thread does the work of many clients, until the last one has stopped`() throws {
        let apns = try server({ _ in })
        defer { apns.stop() }
        let (news, over) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
        let thread = PushThread()
        let own = try identity()
        var options = PushClientOptions(servers: [.production: PushServer(host: "localhost", port: apns.port)])
        options.authorityFile = files.certificate
        let clients = (1...60).map { _ in
            PushClient(options, on: thread, identity: { own }) { news.signal() }
        }
        DispatchQueue.global().async {
            thread.run(clients)
            over.signal()
        }
        // Some stop while the others have not begun.
        for client in clients.prefix(5) { client.stop(patience: .zero) }
        for client in clients.suffix(55) { client.submit(requests(1...3)) }
        var outcomes: [PushOutcome] = []
        while outcomes.count < 3 * 55 {
            news.wait()
            outcomes += clients.flatMap { $0.collect() }
        }
        #expect(outcomes.allSatisfy { status($0) == 200 })
        #expect(apns.records.connections == 55, "each client has its own")
        #expect(clients.last!.state.turns < 1000, "a client without work costs nothing")
        for client in clients { client.stop(patience: .zero) }
        over.wait()
    }

    // Addresses -------------------------------------------------------------------------------------------------------

    @Test func `a server can be an IPv6 address`() throws {
        let apns = try server({ $0.host = "::1" })
        defer { apns.stop() }
        let outcomes = try send(requests(1...50), to: apns.port) {
            $0.servers[.production] = PushServer("[::1]:\(apns.port)")
        }
        #expect(outcomes.allSatisfy { status($0) == 200 }, "\(outcomes.first.map { "\($0.end)" } ?? "")")
    }

    @Test func `an IPv6 address must be in the server's certificate`() throws {
        let apns = try server({ $0.host = "::" })
        defer { apns.stop() }
        let outcomes = try send(requests(1...1), to: apns.port) {
            $0.servers[.production] = PushServer("[::ffff:127.0.0.1]:\(apns.port)")
        }
        #expect(failure(outcomes[0])?.kind == .tls, "\(outcomes)")
        #expect(failure(outcomes[0])?.message.contains("::ffff:127.0.0.1") == true, "\(outcomes)")
    }

    @Test(arguments: [("localhost", true), ("127.0.0.1", false), ("::1", false)])
    func `the handshake names the server, but no address`(_ host: String, isNamed: Bool) throws {
        let family = host.contains(":") ? AF_INET6 : AF_INET
        let listener = socket(family, Int32(SOCK_STREAM.rawValue), 0)
        defer { close(listener) }
        var storage = sockaddr_storage()
        var length = socklen_t(MemoryLayout<sockaddr_storage>.size)
        storage.ss_family = sa_family_t(family)
        let port = withUnsafeMutablePointer(to: &storage) { storage in
            if family == AF_INET6 {
                storage.withMemoryRebound(to: sockaddr_in6.self, capacity: 1) {
                    $0.pointee.sin6_addr = in6addr_loopback
                }
            } else {
                storage.withMemoryRebound(to: sockaddr_in.self, capacity: 1) {
                    $0.pointee.sin_addr.s_addr = UInt32(0x7f00_0001).bigEndian
                }
            }
            storage.withMemoryRebound(to: sockaddr.self, capacity: 1) {
                _ = bind(listener, $0, length)
                listen(listener, 8)
                getsockname(listener, $0, &length)
            }
            return storage.withMemoryRebound(to: sockaddr_in.self, capacity: 1) {
                Int(UInt16(bigEndian: $0.pointee.sin_port))
            }
        }
        // Reads the beginning of the handshake, and hangs up.
        let hello = Mutex<[UInt8]>([])
        let group = DispatchGroup()
        DispatchQueue.global().async(group: group) {
            let connection = accept(listener, nil, nil)
            var bytes = [UInt8](repeating: 0, count: 4096)
            let count = read(connection, &bytes, bytes.count)
            hello.withLock { $0 = Array(bytes.prefix(max(0, count))) }
            close(connection)
        }
        let outcomes = try send(requests(1...1), to: port) {
            $0.servers[.production] = PushServer(host: host, port: port)
        }
        group.wait()
        #expect(failure(outcomes[0])?.mayHaveArrived == false)
        let said = hello.withLock { String(decoding: $0, as: UTF8.self) }
        #expect(said.contains("h2"), "ALPN")
        #expect(said.contains(host) == isNamed)
    }

    // Who is trusted ---------------------------------------------------------------------------------------------------

    @Test func `nothing is sent to a server with an untrusted certificate or another name`() throws {
        let apns = try server()
        defer { apns.stop() }
        let stranger = try TestAuthority()
        let outcomes = try send(requests(1...5), to: apns.port) { $0.authorityFile = stranger.certificate }
        #expect(outcomes.contains { failure($0)?.kind == .tls })
        #expect(outcomes.allSatisfy { failure($0)?.mayHaveArrived == false && $0.sends == 0 })
        let misnamed = try send(requests(1...1), to: apns.port) {
            $0.servers[.production] = PushServer(host: "127.0.0.2", port: apns.port)
        }
        #expect(failure(misnamed[0])?.kind == .tls || failure(misnamed[0])?.kind == .connect)
        #expect(apns.records.requests == 0)
    }

    @Test func `nothing is sent to a server without HTTP/2`() throws {
        let server = Process()
        server.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        server.arguments = [
            "openssl", "s_server", "-accept", "0", "-cert", files.server.certificate, "-key", files.server.key, "-alpn",
            "http/1.1",
        ]
        let (input, output) = (Pipe(), Pipe())
        server.standardInput = input
        server.standardOutput = output
        server.standardError = FileHandle.nullDevice
        try server.run()
        defer {
            // Other tests block SIGTERM, and what is started meanwhile inherits that.
            kill(server.processIdentifier, SIGKILL)
            server.waitUntilExit()
        }
        var said = ""
        while !said.contains("ACCEPT"),
            let more = String(data: output.fileHandleForReading.availableData, encoding: .utf8), !more.isEmpty
        {
            said += more
        }
        let port = try #require(
            Int(
                said.split(whereSeparator: \.isNewline).first { $0.hasPrefix("ACCEPT") }?.split(separator: ":").last
                    ?? ""))
        let outcomes = try send(requests(1...20), to: port)
        #expect(outcomes.count { failure($0)?.kind == .protocolError } == 1, "\(outcomes)")
        #expect(outcomes.count { failure($0)?.kind == .backingOff } == 19, "it is left in peace")
        #expect(outcomes.allSatisfy { $0.sends == 0 && failure($0)?.mayHaveArrived == false })
    }

    @Test func `a client certificate authenticates the sender`() throws {
        let apns = try server({
            $0.clientAuthority = files.certificate
            $0.signingKeys = []
        })
        defer { apns.stop() }
        let pair = try files.clientCertificate("client-\(UUID().uuidString.prefix(8))", topic: "com.example.app")
        let certificate = try ClientCertificate(
            pem: [UInt8](Data(contentsOf: URL(fileURLWithPath: pair.certificate))),
            key: [UInt8](Data(contentsOf: URL(fileURLWithPath: pair.key))), at: .now)
        let identity = PushIdentity(certificateChainPEM: certificate.chainPEM, keyPEM: certificate.keyPEM)
        let outcomes = try send(requests(1...50), to: apns.port, identity: identity)
        #expect(outcomes.allSatisfy { status($0) == 200 })
    }

    // What is said -----------------------------------------------------------------------------------------------------

    @Test func `the request has exactly the expected headers`() throws {
        let apns = try server()
        defer { apns.stop() }
        var full = request(1, token: "ABCDEF", collapseID: "thread 12")
        full.priority = 5
        full.expiration = 1_800_000_000
        full.payload = Array(#"{"aps":{"alert":"ü"}}"#.utf8)
        let outcomes = try send([full, request(2, token: "aa")], to: apns.port)
        #expect(outcomes.allSatisfy { status($0) == 200 })
        let seen = apns.records.exchanges.map(\.request).sorted { $0.apnsID < $1.apnsID }
        #expect(seen[0].token == "abcdef" && seen[0].topic == "com.example.app" && seen[0].pushType == "alert")
        #expect(seen[0].priority == "5" && seen[0].expiration == "1800000000" && seen[0].collapseID == "thread 12")
        #expect(seen[0].apnsID == full.id && seen[0].payload == full.payload)
        #expect(seen[1].priority == nil && seen[1].expiration == nil && seen[1].collapseID == nil)
    }

    @Test func `a stop returns queued requests and waits for those in flight`() throws {
        let apns = try server(answer: { _ in FakeAnswer.accepted.delayed(by: .milliseconds(50)) })
        defer { apns.stop() }
        let outcomes = try send(requests(1...500), to: apns.port) {
            $0.inFlight = 10
        } meanwhile: { client, outcomes in
            if !outcomes.isEmpty { client.stop(patience: .seconds(30)) }
        }
        let (sent, withdrawn) = (outcomes.count { status($0) == 200 }, outcomes.count { $0.end == .withdrawn })
        #expect(sent > 0 && withdrawn > 0 && sent + withdrawn == 500)
        #expect(apns.records.requests == sent, "what was given back was never sent")
    }

    // Taking back ------------------------------------------------------------------------------------------------------

    /// A server with few streams, or with slow answers.
    @Test(arguments: [2, 1000]) func `what is withdrawn before it was sent never arrives`(streams: Int) throws {
        let apns = try server(
            { $0.maximumStreams = streams }, answer: { _ in FakeAnswer.accepted.delayed(by: .milliseconds(300)) })
        defer { apns.stop() }
        var hasWithdrawn = false
        let outcomes = try send(requests(1...500), to: apns.port) {
            $0.inFlight = 50
            $0.connections = 1
        } meanwhile: { client, outcomes in
            if !hasWithdrawn, outcomes.contains(where: { status($0) == 200 }) {
                hasWithdrawn = true
                client.withdraw(Set(1...500))
            }
        }
        let withdrawn = outcomes.filter { $0.end == .withdrawn }
        #expect(withdrawn.count > 400 && withdrawn.allSatisfy { $0.sends == 0 && $0.sentAt == nil })
        #expect(outcomes.count { status($0) == 200 && $0.sends == 1 } == 500 - withdrawn.count)
        #expect(apns.records.requests == 500 - withdrawn.count)
    }

    @Test func `a request is reported as sent before the server has it, and as not sent when the server refuses it`()
        throws
    {
        let seen = Seen()
        let apns = try server(answer: { request in
            seen.arrived(Int(request.apnsID.suffix(12), radix: 16) ?? 0)
            return 100...110 ~= request.ordinal ? .reset(code: 7) : nil
        })
        defer { apns.stop() }
        let outcomes = try send(requests(1...500), to: apns.port) { $0.observer = seen }
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
        let (late, sent, refused) = seen.counts
        #expect(late == 0 && refused == apns.records.refused && refused > 0)
        #expect(sent == 500 + refused)
    }

    @Test func `nothing is reported as sent to a server that cannot be reached`() throws {
        let seen = Seen()
        let outcomes = try send(requests(1...100), to: 1) { $0.observer = seen }
        #expect(outcomes.allSatisfy { $0.sends == 0 } && seen.counts.sent == 0)
    }

    /// What a client reports, and what the server sees.
    private final class Seen: SendObserver {
        private struct State {
            var sent: Set<Int> = []
            var (late, calls, refused) = (0, 0, 0)
        }

        private let state = Mutex(State())

        var counts: (late: Int, sent: Int, refused: Int) { state.withLock { ($0.late, $0.calls, $0.refused) } }

        func arrived(_ slot: Int) {
            state.withLock { if !$0.sent.contains(slot) { $0.late += 1 } }
        }

        func maySend(_ slot: Int) {
            state.withLock {
                $0.sent.insert(slot)
                $0.calls += 1
            }
        }

        func didNotSend(_ slot: Int) {
            state.withLock {
                $0.sent.remove(slot)
                $0.refused += 1
            }
        }
    }
}
