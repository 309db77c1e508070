import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("The frames of an answer are as the script says", .ownThread)
struct AnswerFrameTests {
    /// Answers every request with this.
    private func start(_ answer: String) throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.requiresProviderToken = false
        return try FakeAPNs.start(options, script: FakeScript(json: #"{"rules": [{"answer": \#(answer)}]}"#))
    }

    private func story(_ answer: String) async throws -> [String] {
        let apns = try start(answer)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let story = try await client.story(client.post(authorization: ""))
        await client.close()
        #expect(apns.records.faults == [])
        return story
    }

    @Test(arguments: [
        (#"{"status": 200, "cut": {}}"#, [":status 200", "RST 0"]),
        (#"{"status": 200, "cut": {"code": 8}}"#, [":status 200", "RST 8"]),
        (#"{"status": 410, "reason": "Unregistered", "cut": {"code": 8}}"#, [":status 410", "RST 8"]),
        (
            #"{"status": 410, "reason": "Unregistered", "timestamp": 7, "cut": {"after": 15}}"#,
            [":status 410", #"{"reason":"Unre"#, "RST 0"]
        ),
        (
            #"{"status": 400, "reason": "BadTopic", "cut": {"after": 1000, "by": "reset"}}"#,
            [":status 400", #"{"reason":"BadTopic"}"#, "RST 0"]
        ),
        (
            #"{"raw": {"status": "200", "body": "abcdef", "headers": [["x", "y"]]}, "cut": {"after": 3, "code": 2}}"#,
            [":status 200, x y", "abc", "RST 2"]
        ),
    ]) func `an answer is cut short by RST_STREAM, after its headers or in the middle of its body`(
        _ answer: String, _ frames: [String]
    ) async throws {
        #expect(try await story(answer) == frames)
    }

    @Test(arguments: ["200", #"400, "reason": "BadTopic""#]) func `RST_STREAM may follow an answer that is complete`(
        _ status: String
    ) async throws {
        let apns = try start(#"{"status": \#(status), "cut": {"after": "end"}}"#)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let stream = try await client.post(authorization: "")
        #expect(try await client.story(stream).last?.hasSuffix("END") == true)
        try await client.ping()
        await client.close()
        let answer: [UInt8] = status == "200" ? [1] : [1, 0]
        #expect(try await client.types(stream) == answer + [3])
    }

    @Test func `headers and RST_STREAM are sent together, so that a client reads both at once`() async throws {
        let apns = try start(#"{"status": 200, "cut": {}}"#)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let stream = try await client.post(authorization: "")
        _ = try await client.story(stream)
        await client.close()
        #expect(try await client.pieces(stream) == 1)
    }

    @Test(arguments: [
        (#"{"status": 410, "reason": "Unregistered", "cut": {"by": "close", "after": 9}}"#, [1, 0] as [UInt8]),
        (#"{"status": 200, "cut": {"by": "close"}}"#, [1]),
        (#"{"status": 200, "cut": {"by": "close", "after": "end"}}"#, [1]),
    ]) func `a connection ends in the middle of an answer`(_ answer: String, _ types: [UInt8]) async throws {
        let apns = try start(answer)
        defer { apns.stop() }
        let client = try await FrameClient.connect(to: apns)
        let stream = try await client.post(authorization: "")
        #expect(try await client.types(stream) == types)
        #expect(try await client.types(0).contains(7) == false, "no GOAWAY")
        #expect(apns.records.seen == 1 && apns.records.streams == 0)
    }

    @Test func `interim responses precede the answer`() async throws {
        #expect(
            try await story(#"{"status": 200, "informational": [100, 103, 100]}"#)
                == [":status 100", ":status 103", ":status 100", ":status 200, END"])
        #expect(
            try await story(#"{"status": 400, "reason": "BadTopic", "informational": [103]}"#)
                == [":status 103", ":status 400", #"{"reason":"BadTopic"} END"#])
    }

    @Test func `trailers end an answer, with and without a body`() async throws {
        #expect(
            try await story(#"{"status": 400, "reason": "BadTopic", "trailers": [["x-checksum", "7"]]}"#)
                == [":status 400", #"{"reason":"BadTopic"}"#, "x-checksum 7, END"])
        #expect(
            try await story(#"{"status": 200, "trailers": [["x-checksum", "7"], ["y", "z"]]}"#)
                == [":status 200", "x-checksum 7, y z, END"])
    }

    @Test func `curl understands 1xx and trailers`() throws {
        let apns: FakeAPNs = try FakeAPNs.start(FakeOptions(Fixture.authority)) { _ in
            .refused(400, "BadTopic").preceded(by: [103]).followed(byTrailers: [("x-checksum", "7")])
        }
        defer { apns.stop() }
        let answer = try apns.send(Fixture.request())
        #expect(answer.exit == 0 && answer.status == 103, "curl shows the first: \(answer)")
        #expect(answer.body.hasPrefix("HTTP/2 400") && answer.body.contains(#"{"reason":"BadTopic"}"#))
    }
}
