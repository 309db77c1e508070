import FakeAPNs
import Foundation
import NIOHTTP2
import TestThreads
import Testing

@Suite("What is refused was not processed, and the records tell the two apart", .ownThread)
struct RefusalTests {
    private let ids = (1...9).map { "69e4908d-5248-4d9c-b91c-3c9c86d44e0\($0)" }

    /// A client that has sent these requests, whose streams are 1, 3, 5, …
    private func client(of apns: FakeAPNs, posting count: Int) async throws -> FrameClient {
        let client = try await FrameClient.connect(to: apns)
        _ = try await client.post((1...count).map { ("0\($0)", ids[$0 - 1]) }, authorization: "")
        return client
    }

    private func start(_ json: String, log: (@Sendable (FakeExchange) -> Void)? = nil) throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.requiresProviderToken = false
        options.log = log
        return try FakeAPNs.start(options, script: FakeScript(json: json))
    }

    @Test
    func
        `after the given number of requests, GOAWAY refuses the following ones: they are neither answered nor counted`()
        async throws
    {
        let apns: FakeAPNs = try start(
            """
            {"rules": [{
                "match": {"connectionFrom": 2, "connectionTo": 2},
                "answer": {"goAway": {"last": "processed", "reason": "Shutdown", "closing": "never"}}
            }]}
            """)
        defer { apns.stop() }
        for connection in 1...2 {
            let client = try await client(of: apns, posting: 4)
            #expect(try await client.goAway() == .init(last: 3, code: 0, data: #"{"reason":"Shutdown"}"#))
            #expect(try await client.status(1) == "200")
            #expect(try await client.status(3) == "200")
            await client.close()
            #expect(try await client.types(5) == [], "nothing comes on a refused stream")
            #expect(apns.records.seen == connection * 2)
        }
        #expect(apns.records.identifiers == [ids[0]: 2, ids[1]: 2])
        #expect(apns.records.requests == 4 && apns.records.refused == 0, "what follows GOAWAY is not even read")
        #expect(apns.records.connections == 2)
    }

    @Test
    func `GOAWAY can refuse a request that has arrived without an answer: it then counts as refused, not as seen`()
        async throws
    {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "03"}, "answer": {"never": true}},
                {"match": {"token": "04"}, "answer": {"goAway": {"last": 3, "code": 11, "reason": "TooManyRequests"}}}
            ]}
            """)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 4)
        #expect(try await client.goAway() == .init(last: 3, code: 11, data: #"{"reason":"TooManyRequests"}"#))
        try await client.closed()
        #expect(apns.records.identifiers == [ids[0]: 1, ids[1]: 1])
        #expect(apns.records.refusals == [ids[2]: 1, ids[3]: 1])
        #expect(apns.records.seen == 2 && apns.records.refused == 2)
        #expect(apns.records.outcomes == [FakeOutcome(200): 2, FakeOutcome(0, "goAway"): 2])
        #expect(apns.records.exchanges.map(\.isRefused) == [false, false, true, true])
        #expect(apns.records.streams == 0)
    }

    @Test func `a last stream above those that have arrived allows more requests up to it`() async throws {
        let apns: FakeAPNs = try start(
            #"{"rules": [{"match": {"to": 1}, "answer": {"goAway": {"last": 5, "closing": "never"}}}]}"#)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 4)
        #expect(try await client.goAway().last == 5)
        for stream in [1, 3, 5] { #expect(try await client.status(stream) == "200") }
        try await client.ping()
        await client.close()
        #expect(try await client.types(7) == [])
        #expect(apns.records.seen == 3)
    }

    @Test
    func
        `a notice of 2^31-1 comes first; what was sent before the client has read it is answered, and then comes the last stream`()
        async throws
    {
        let apns: FakeAPNs = try start(
            #"{"rules": [{"match": {"to": 1}, "answer": {"goAway": {"last": "seen", "notice": "round-trip"}}}]}"#)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 3)
        #expect(try await client.goAway(1) == .init(last: 0x7fff_ffff, code: 0, data: ""))
        #expect(try await client.goAway(2) == .init(last: 5, code: 0, data: #"{"reason":"Shutdown"}"#))
        for stream in [1, 3, 5] { #expect(try await client.status(stream) == "200") }
        try await client.closed()
        #expect(apns.records.seen == 3 && apns.records.refused == 0)
    }

    @Test(arguments: ["0", "0.01"]) func `a notice may be followed by the real GOAWAY at once, or after a while`(
        _ time: String
    ) async throws {
        let apns: FakeAPNs = try start(
            #"{"rules": [{"match": {"token": "01"}, "answer": {"goAway": {"notice": \#(time), "reason": null}}}]}"#)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 1)
        #expect(try await client.goAway(1) == .init(last: 0x7fff_ffff, code: 0, data: ""))
        #expect(try await client.goAway(2) == .init(last: 0, code: 0, data: ""))
        try await client.closed()
        #expect(apns.records.seen == 0 && apns.records.refused == 1)
    }

    @Test func `a later GOAWAY may lower the last stream, and cannot raise it`() async throws {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "01"}, "answer": {"never": true}},
                {"match": {"token": "02"}, "answer": {"goAway": {"last": 5, "closing": "never"}}},
                {"match": {"token": "03"}, "answer": {"goAway": {"last": 1, "closing": "never"}}}
            ]}
            """)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 3)
        #expect(try await client.goAway(1).last == 5)
        #expect(try await client.goAway(2).last == 1)
        await client.close()
        #expect(apns.records.refusals == [ids[2]: 1])
        #expect(apns.records.identifiers == [ids[0]: 1, ids[1]: 1])

        let raising: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "01"}, "answer": {"goAway": {"last": 3, "closing": "never"}}},
                {"match": {"token": "02"}, "answer": {"goAway": {"last": 9, "closing": "after-streams"}}}
            ]}
            """)
        defer { raising.stop() }
        let other = try await self.client(of: raising, posting: 3)
        #expect(try await other.goAway(1).last == 3)
        try await other.closed()
        await #expect(throws: (any Error).self) { try await other.goAway(2) }
        #expect(raising.records.seen == 2)
    }

    @Test func `a stream that is refused leaves the others alone`() async throws {
        let apns: FakeAPNs = try start(#"{"rules": [{"match": {"token": "02"}, "answer": {"reset": 7}}]}"#)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 3)
        #expect(try await client.reset(3) == .refusedStream)
        #expect(try await client.status(1) == "200")
        #expect(try await client.status(5) == "200")
        await client.close()
        #expect(apns.records.refusals == [ids[1]: 1])
        #expect(apns.records.identifiers == [ids[0]: 1, ids[2]: 1])
        #expect(apns.records.outcomes == [FakeOutcome(200): 2, FakeOutcome(0, "reset"): 1])
    }

    @Test func `another reset does not say whether the request was processed, and counts as seen`() async throws {
        let apns: FakeAPNs = try start(#"{"rules": [{"answer": {"reset": 2}}]}"#)
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 1)
        #expect(try await client.reset(1) == .internalError)
        #expect(apns.records.seen == 1 && apns.records.refused == 0)
        await client.close()
    }

    @Test func `the log has a second line for a request that GOAWAY refuses later`() async throws {
        let log = Told()
        let script = """
            {"rules": [
                {"match": {"token": "01"}, "answer": {"never": true}},
                {"match": {"token": "02"}, "answer": {"goAway": {"last": 0}}}
            ]}
            """
        let apns = try start(script) { log.append($0) }
        defer { apns.stop() }
        let client = try await client(of: apns, posting: 2)
        try await client.closed()
        #expect(log.lines == ["1 0 never", "3 0 goAway refused", "1 0 goAway refused"])
    }
}

/// The lines that a server has logged.
private final class Told: @unchecked Sendable {  // The lock guards the lines.
    private let lock = NSLock()
    private var told: [String] = []

    var lines: [String] { lock.withLock { told } }

    func append(_ exchange: FakeExchange) {
        let line = "\(exchange.request.stream) \(exchange.outcome)\(exchange.isRefused ? " refused" : "")"
        lock.withLock { told.append(line) }
    }
}
