import FakeAPNs
import Foundation
import NIOHTTP2
import Synchronization
import TestThreads
import Testing

@Suite("Connections begin and end as those of APNs", .ownThread)
struct ConnectionTests {
    private func start(
        _ options: FakeOptions = FakeOptions(Fixture.authority), answer: @escaping FakeAPNs.Answer = { _ in nil }
    ) throws -> FakeAPNs {
        try FakeAPNs.start(options, answer: answer)
    }

    private func options(_ change: (inout FakeOptions) -> Void) -> FakeOptions {
        var options = FakeOptions(Fixture.authority)
        change(&options)
        return options
    }

    @Test func `a client that trusts another CA refuses the server`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let other = try TestAuthority()
        let answer = try Fixture.request().send(to: apns.port, trusting: other)
        #expect(answer.exit == 60, "\(answer.complaint)")
        #expect(apns.records.requests == 0)
    }

    @Test func `TLS 1.1 is refused`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let answer = try apns.send(
            Fixture.request { $0.arguments = ["--tlsv1.1", "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0"] })
        #expect(answer.exit == 35, "\(answer.complaint)")
        #expect(answer.complaint.contains("protocol version"))
    }

    @Test func `TLS 1.2 is enough`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        #expect(try apns.send(Fixture.request { $0.arguments = ["--tls-max", "1.2"] }).status == 200)
    }

    @Test(arguments: ["--no-alpn", "--http1.1"]) func `a client without HTTP/2 is refused`(_ option: String) throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let answer = try apns.send(Fixture.request { $0.arguments = [option] })
        #expect(answer.exit == 52, "\(answer.complaint)")
        #expect(answer.status == nil)
        #expect(apns.records.connections == 1)
        #expect(apns.records.requests == 0)
        #expect(apns.records.faults == ["the client does not speak h2: it has not sent HTTP/2's preface"])
    }

    @Test func `a client without ALPN is served when it speaks HTTP/2, as at APNs`() async throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns, protocols: [])
        #expect(try await client.status(client.post(authorization: Fixture.bearer())) == "200")
        #expect(try await client.status(client.post(authorization: "bearer nonsense")) == "403")
        await client.close()
        let answer = try apns.send(Fixture.request { $0.arguments = ["--no-alpn", "--http2-prior-knowledge"] })
        #expect(answer.status == 200, "\(answer.complaint)")
        #expect(apns.records.faults == [])
    }

    @Test func `until the first valid JWT, a connection may have one stream`() async throws {
        let apns: FakeAPNs = try start(options { $0.provesFirst = true })
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.streamLimit(1) == 1)
        #expect(try await client.status(client.post(authorization: "bearer nonsense")) == "403")
        #expect(try await client.status(client.post(authorization: Fixture.bearer())) == "200")
        #expect(try await client.streamLimit(2) == 1000)
        #expect(try await client.status(client.post(authorization: Fixture.bearer())) == "200")
        await client.close()
    }

    @Test func `a client within the stream limit gets its answers one by one`() async throws {
        let apns: FakeAPNs = try start(options { $0.maximumStreams = 1 }) { _ in .accepted.delayed(by: .milliseconds(1))
        }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.streamLimit(1) == 1)
        #expect(try await client.statuses(of: 5, authorization: Fixture.bearer()) == Array(repeating: "200", count: 5))
        #expect(apns.records.mostStreamsOfOneConnection == 1)
        await client.close()
    }

    @Test
    func
        `GOAWAY that leaves a request out: its stream is above the last one, Apple's reason is in it, the rest is answered`()
        async throws
    {
        let apns: FakeAPNs = try start { request in
            switch request.token {
            case "aaaa": .accepted.delayed(by: .milliseconds(20))
            case "bbbb": .goAway()
            default: nil
            }
        }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let bearer = try Fixture.bearer()
        let first = try await client.post(token: "aaaa", authorization: bearer)
        let second = try await client.post(token: "bbbb", authorization: bearer)
        #expect(try await client.goAway() == .init(last: first, code: 0, data: "{\"reason\":\"Shutdown\"}"))
        #expect(try await client.status(first) == "200")
        try await client.closed()
        await #expect(throws: (any Error).self) { try await client.status(second) }
        #expect(apns.records.count(0, "goAway") == 1)
    }

    @Test func `a GOAWAY that includes a request is sent after its answer`() async throws {
        let apns: FakeAPNs = try start { _ in .goAway(.init(last: .thisProcessed, code: 2, reason: nil)) }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let stream = try await client.post(authorization: Fixture.bearer())
        #expect(try await client.goAway() == .init(last: stream, code: 2, data: ""))
        #expect(try await client.status(stream) == "200")
        try await client.closed()
    }

    @Test func `an immediate GOAWAY does not say whether the request was processed`() async throws {
        let apns: FakeAPNs = try start { _ in .goAway(.init(last: .thisProcessed, closing: .atOnce)) }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let stream = try await client.post(authorization: Fixture.bearer())
        #expect(try await client.goAway().last == stream)
        try await client.closed()
        await #expect(throws: (any Error).self) { try await client.status(stream) }
    }

    @Test func `curl repeats requests that a GOAWAY refused on a new connection`() throws {
        let apns: FakeAPNs = try start { $0.connection == 1 ? .goAway() : nil }
        defer { apns.stop() }
        let answer = try apns.send(Fixture.request { $0.arguments = ["--retry", "1", "--retry-all-errors"] })
        #expect(answer.status == 200, "\(answer.complaint)")
        #expect(apns.records.connections == 2)
    }

    @Test func `the script can reset a stream and close a connection`() async throws {
        let apns: FakeAPNs = try start { $0.token == "aaaa" ? .reset(code: 7) : .close }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let bearer = try Fixture.bearer()
        #expect(try await client.reset(client.post(token: "aaaa", authorization: bearer)) == .refusedStream)
        _ = try await client.post(authorization: bearer)
        try await client.closed()
        #expect(apns.records.outcomes == [FakeOutcome(0, "reset"): 1, FakeOutcome(0, "close"): 1])
    }

    @Test func `connections are dropped on request, and new ones accepted`() async throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.status(client.post(authorization: Fixture.bearer())) == "200")
        apns.dropConnections()
        try await client.closed()
        #expect(try apns.send(Fixture.request()).status == 200)
    }

    @Test func `it also starts and stops in asynchronous code`() async throws {
        // On an address of its own: another server may get the port soon.
        var options = FakeOptions(Fixture.authority)
        options.host = "127.20.0.7"
        let apns = try await FakeAPNs.start(options)
        let request = try Fixture.request { $0.arguments = ["--connect-to", "::\(options.host):"] }
        #expect(try apns.send(request).status == 200)
        await apns.stop()
        #expect(try apns.send(request).exit == 7)
        #expect(apns.records.requests == 1)
    }
}
