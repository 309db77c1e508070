import FakeAPNs
import Foundation
import Synchronization
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// The client over TLS, to a server whose every frame the test decides.
@Suite(.ownThread) struct `The client, frame by frame` {
    private let files: TestAuthority
    private let gone = #"{"reason":"Unregistered","timestamp":1508249865488}"#

    init() throws {
        files = try TestAuthority.ofClients.get()
    }

    private func send(
        _ requests: [PushRequest], to server: FrameServer, _ change: (inout PushClientOptions) -> Void = { _ in },
        meanwhile: (PushClient, [PushOutcome]) -> Void = { _, _ in }
    ) -> [PushOutcome] {
        var options = PushClientOptions(servers: [.production: PushServer(host: "localhost", port: server.port)])
        options.authorityFile = files.certificate
        change(&options)
        return sendAll(requests, PushIdentity(authorization: { "secret" }), options, meanwhile: meanwhile)
    }

    /// Answers whole requests.
    private static func answer(_ frame: FrameReader.Frame, _ status: String = "200") -> [FrameServer.Reply] {
        frame.endsStream ? [.bytes(Frames.answer(frame.stream, status))] : []
    }

    @Test func `requests refused by GOAWAY are answered on the next connection, which opens before the old one ends`()
        throws
    {
        // Of the first connection, streams 1, 3 and 5 are processed, and 3 and 5 are never answered.
        let server = try FrameServer.start(files) { connection, frame in
            guard connection == 1 else { return Self.answer(frame) }
            if frame.stream == 1 { return Self.answer(frame) }
            if frame.endsStream, frame.stream == 21 {
                return [.bytes(Frames.goAway(last: 5, #"{"reason":"BadCertificate"}"#))]
            }
            return []
        }
        defer { server.stop() }
        var options = PushClientOptions(servers: [.production: PushServer(host: "localhost", port: server.port)])
        options.authorityFile = files.certificate
        options.answerTimeout = .seconds(3)
        var state = PushClientState()
        let outcomes = sendAll(requests(1...50), PushIdentity(authorization: { "secret" }), options) { client, _ in
            state = client.state
        }
        #expect(outcomes.allSatisfy { status($0) == 200 })
        #expect(outcomes.count { $0.sends == 2 } == 2, "the two that were processed and never answered")
        #expect(server.connections == 2)
        #expect(
            state.faults == [
                .production: PushFault(PushGoAway(code: 0, text: #"{"reason":"BadCertificate"}"#), isCurrent: false)
            ])
    }

    @Test func `a server that sends GOAWAY after every ten requests gets each request once`() throws {
        let server = try FrameServer.start(files, settings: [(.mostStreams, 128)]) { _, frame in
            guard frame.endsStream, frame.stream <= 19 else { return [] }
            let goAway = frame.stream == 19 ? Frames.goAway(last: 19) : []
            return [.bytes(Frames.answer(frame.stream, "200") + goAway)] + (frame.stream == 19 ? [.close] : [])
        }
        defer { server.stop() }
        let outcomes = send(requests(1...500), to: server)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 }, "\(outcomes.first { $0.sends != 1 }!)")
        #expect(server.connections >= 50)
    }

    @Test func `REFUSED_STREAM moves a request to the other connection`() throws {
        let server = try FrameServer.start(files) { connection, frame in
            guard frame.endsStream else { return [] }
            if connection == 1, frame.stream > 1 { return [.bytes(Frames.reset(frame.stream, code: 7))] }
            return Self.answer(frame)
        }
        defer { server.stop() }
        let outcomes = send(requests(1...100), to: server)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
    }

    @Test func `RST_STREAM directly after the HEADERS of a 200 repeats nothing`() throws {
        let server = try FrameServer.start(files) { _, frame in
            frame.endsStream ? [.bytes(Frames.head(frame.stream, "200") + Frames.reset(frame.stream, code: 2))] : []
        }
        defer { server.stop() }
        let outcomes = send(requests(1...200), to: server)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 } && server.requests == 200)
    }

    @Test(arguments: [false, true])
    func `a request whose 410 was cut short is repeated`(_ isReset: Bool) throws {
        let server = try FrameServer.start(files) { connection, frame in
            guard frame.endsStream else { return [] }
            if frame.stream > 1 || connection > 1 { return [.bytes(Frames.answer(frame.stream, "410", gone))] }
            let part = Frames.head(1, "410") + Frames.data(1, gone, ends: false)
            return isReset ? [.bytes(part + Frames.reset(1, code: 0))] : [.bytes(part), .close]
        }
        defer { server.stop() }
        let outcomes = send(requests(1...1), to: server)
        #expect(outcomes.map(status) == [410] && outcomes[0].sends == 2)
        let once = try FrameServer.start(files) { _, frame in
            guard frame.endsStream else { return [] }
            let part = Frames.head(frame.stream, "410") + Frames.data(frame.stream, gone, ends: false)
            return [.bytes(part + Frames.reset(frame.stream, code: 0))]
        }
        defer { once.stop() }
        let torn = send(requests(1...1), to: once)
        #expect(failure(torn[0])?.kind == .connectionLost && torn[0].sends == 2)
    }

    @Test func `a PING finds a dead connection`() throws {
        let server = try FrameServer.start(files) { connection, frame in
            if connection > 1 || frame.stream == 1 { return Self.answer(frame) }
            return []
        }
        defer { server.stop() }
        // The time limit of an answer is beyond what the test would wait for.
        let outcomes = send(requests(1...5), to: server) { $0.answerTimeout = .seconds(6) }
        #expect(outcomes.allSatisfy { status($0) == 200 } && outcomes.count { $0.sends == 2 } == 4)
        let frames = server.frames.filter { $0.connection == 1 }.map(\.frame)
        #expect(frames.contains { $0.kind == .ping && !$0.isAcknowledgement })
        #expect(!frames.contains { $0.kind == .reset }, "no answer was late")
    }

    @Test func `with one stream, the next request follows each answer at once`() throws {
        let open = Atomic(0)
        let most = Atomic(0)
        let server = try FrameServer.start(files, settings: [(.mostStreams, 1)]) { _, frame in
            if frame.kind == .headers { most.max(open.add(1, ordering: .relaxed).newValue, ordering: .relaxed) }
            guard frame.endsStream else { return [] }
            open.subtract(1, ordering: .relaxed)
            return Self.answer(frame)
        }
        defer { server.stop() }
        let outcomes = send(requests(1...300), to: server) { $0.connections = 1 }
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
        #expect(most.load(ordering: .relaxed) == 1 && server.connections == 1)
    }

    @Test func `answers are read while windows of zero and one byte hold requests back`() throws {
        let server = try FrameServer.start(files, settings: [(.mostStreams, 1000), (.initialWindow, 0)]) { _, frame in
            switch frame.kind {
            case .headers: [.bytes(Frames.windowUpdate(frame.stream, by: 1))]
            case .data where frame.endsStream: Self.answer(frame)
            case .data: [.bytes(Frames.windowUpdate(frame.stream, by: 1))]
            default: []
            }
        }
        defer { server.stop() }
        let outcomes = send(requests(1...300), to: server)
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 })
    }

    @Test func `a server that stops reading gets each request once, and its answers are read meanwhile`()
        throws
    {
        // It stops at the 20th request, and reads again when the client has its answer.
        let server = try FrameServer.start(files) { _, frame in
            frame.endsStream ? Self.answer(frame) + (frame.stream == 39 ? [.stopReading] : []) : []
        }
        defer { server.stop() }
        let requests = requests(1...2000).map { request in
            var request = request
            request.payload = [UInt8](repeating: 0x20, count: 4000)
            return request
        }
        let hasPaused = Mutex(false)
        let outcomes = send(requests, to: server) { _ in
        } meanwhile: { client, outcomes in
            // The client has read what the server said before it stopped.
            if outcomes.contains(where: { $0.request.id == requests[19].id }) {
                hasPaused.withLock { $0 = true }
                server.readAgain()
            }
        }
        #expect(hasPaused.withLock { $0 })
        #expect(outcomes.allSatisfy { status($0) == 200 && $0.sends == 1 } && server.requests == 2000)
    }

    @Test func `a request has the frames and headers that Apple asks for, and no others`() throws {
        let server = try FrameServer.start(files) { _, frame in Self.answer(frame) }
        defer { server.stop() }
        _ = send(requests(1...2), to: server)
        let kinds = server.frames.map(\.frame).filter { $0.stream > 0 }.map(\.kind)
        #expect(kinds == [.headers, .data, .headers, .data])
    }
}
