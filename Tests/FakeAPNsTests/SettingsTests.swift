import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("SETTINGS bound what a client may send", .ownThread)
struct SettingsTests {
    private func start(_ json: String, _ change: (inout FakeOptions) -> Void = { _ in }) throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.requiresProviderToken = false
        change(&options)
        return try FakeAPNs.start(options, script: FakeScript(json: json))
    }

    @Test func `a window of 0 holds bodies back until the server opens it`() async throws {
        let apns: FakeAPNs = try start(#"{"settings": [{"initialWindow": 0}]}"#)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.setting(.initialWindowSize, 1) == 0)
        let stream = try await client.post(authorization: "")
        try await client.ping()
        #expect(apns.records.streams == 1, "its headers have arrived")
        #expect(apns.records.requests == 0)
        apns.change(.init(initialWindow: 65_535))
        #expect(try await client.status(stream) == "200")
        #expect(apns.records.exchanges.first?.request.payload == Array(CurlRequest().body.utf8))
        await client.close()
        let next = try await FrameClient.connect(to: apns)
        #expect(try await next.setting(.initialWindowSize, 1) == 65_535, "new connections begin open")
        await next.close()
    }

    @Test func `a script opens the window a while after a connection has begun`() async throws {
        let apns: FakeAPNs = try start(
            #"{"settings": [{"initialWindow": 0}, {"after": 0.05, "initialWindow": 16, "maximumStreams": 7}]}"#)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.setting(.initialWindowSize, 1) == 0)
        #expect(try await client.status(client.post(authorization: "")) == "200")
        #expect(try await client.setting(.initialWindowSize, 2) == 16)
        #expect(try await client.streamLimit(2) == 7)
        await client.close()
    }

    @Test func `through a window of 1 a body arrives complete, byte by byte`() async throws {
        let apns: FakeAPNs = try start(#"{"settings": [{"initialWindow": 1}]}"#)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.setting(.initialWindowSize, 1) == 1)
        let streams = [try await client.post(authorization: ""), try await client.post(authorization: "")]
        for stream in streams { #expect(try await client.status(stream) == "200") }
        await client.close()
        let body = Array(CurlRequest().body.utf8)
        #expect(apns.records.exchanges.map(\.request.payload) == [body, body])
        // A WINDOW_UPDATE for each byte but the last.
        #expect(try await client.types(streams[0]).filter { $0 == 8 }.count == body.count - 1)
    }

    @Test func `curl gets its body through a window of 1`() throws {
        let apns: FakeAPNs = try start(#"{"settings": [{"initialWindow": 1}]}"#)
        defer { apns.stop() }
        #expect(try apns.send(Fixture.request()).status == 200)
        #expect(apns.records.exchanges.first?.request.payload == Array(CurlRequest().body.utf8))
    }

    @Test(arguments: [false, true]) func `a connection can be limited to one stream even after a valid JWT`(
        _ provesFirst: Bool
    ) async throws {
        let apns: FakeAPNs = try start(#"{"settings": [{"maximumStreams": 1}]}"#) {
            $0.requiresProviderToken = true
            $0.provesFirst = provesFirst
        }
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.streamLimit(1) == 1)
        #expect(try await client.statuses(of: 5, authorization: Fixture.bearer()) == Array(repeating: "200", count: 5))
        if provesFirst { #expect(try await client.streamLimit(2) == 1) }
        #expect(apns.records.mostStreamsOfOneConnection == 1)
        await client.close()
    }

    @Test func `an answer may lower and raise the limit of streams on its connection`() async throws {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "aa"}, "answer": {"status": 200, "settings": {"maximumStreams": 1, "initialWindow": 7}}},
                {"match": {"token": "bb"}, "answer": {"status": 200, "settings": {"maximumStreams": 9}}}
            ]}
            """)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        #expect(try await client.streamLimit(1) == 1000)
        #expect(try await client.status(client.post(token: "aa", authorization: "")) == "200")
        #expect(try await client.streamLimit(2) == 1)
        #expect(try await client.setting(.initialWindowSize, 2) == 7)
        #expect(try await client.status(client.post(token: "bb", authorization: "")) == "200")
        #expect(try await client.streamLimit(3) == 9)
        await client.close()
        let next = try await FrameClient.connect(to: apns)
        #expect(try await next.streamLimit(1) == 1000)
        await next.close()
    }
}
