import FakeAPNs
import Foundation
import TestThreads
import Testing

@Suite("Scripts say what is answered", .ownThread)
struct ScriptTests {
    private let clock = HandClock()

    private func start(_ json: String) throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.now = { [clock] in clock.now }
        options.requiresProviderToken = false
        return try FakeAPNs.start(options, script: FakeScript(json: json))
    }

    private func outcome(_ apns: FakeAPNs, _ token: String = "aaaa", topic: String = "com.example.app") throws -> String
    {
        let answer = try apns.send(
            Fixture.request {
                $0.path = "/3/device/" + token
                $0.headers = [("apns-topic", topic)]
            })
        return "\(answer.status.map(String.init) ?? "none") \(answer.body)".trimmingCharacters(in: .whitespaces)
    }

    @Test func `a token dies at its time, with that timestamp, for its topic, and comes back`() throws {
        let apns: FakeAPNs = try start(
            """
            {"deaths": [{"token": "AAAA", "topic": "com.example.app", "after": 10, "revivedAfter": 20}]}
            """)
        defer { apns.stop() }
        let stale = "410 {\"reason\":\"Unregistered\",\"timestamp\":\(apns.startedAt + 10_000)}"
        #expect(try outcome(apns) == "200")
        clock.advance(seconds: 10)
        #expect(try outcome(apns) == stale)
        #expect(try outcome(apns, "AaAa") == stale)
        #expect(try outcome(apns, "bbbb") == "200")
        #expect(try outcome(apns, topic: "com.example.app.voip") == "200")
        clock.advance(seconds: 10)
        #expect(try outcome(apns) == "200")
    }

    @Test func `a death may be given as an instant, and with another reason; a test may kill and revive on its own`()
        throws
    {
        let apns: FakeAPNs = try start(
            """
            {"deaths": [{"token": "aaaa", "at": 1508249865488, "reason": "ExpiredToken"}]}
            """)
        defer { apns.stop() }
        #expect(try outcome(apns) == "410 {\"reason\":\"ExpiredToken\",\"timestamp\":1508249865488}")
        apns.deaths.revive("AAAA")
        #expect(try outcome(apns) == "200")
        apns.deaths.die("aaaa", .init(at: clock.now))
        #expect(try outcome(apns) == "410 {\"reason\":\"Unregistered\",\"timestamp\":\(clock.now)}")
    }

    @Test func `a share of all tokens dies, the same ones in each run`() throws {
        let apns: FakeAPNs = try start("{\"deaths\": [{\"share\": 0.02, \"after\": 0}]}")
        defer { apns.stop() }
        let tokens = (0..<10_000).map { String(format: "%064x", $0) }
        let stale = tokens.filter { apns.deaths.death(of: $0, topic: nil, at: clock.now) != nil }
        #expect(150...250 ~= stale.count)
        #expect(try outcome(apns, stale[0]).hasPrefix("410"))
        let alive = try #require(tokens.first { !stale.contains($0) })
        #expect(try outcome(apns, alive) == "200")
    }

    @Test func `the first matching rule applies: token, prefix, topic, ordinal, time, every nth`() throws {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "aaaa"}, "answer": {"status": 429, "reason": "TooManyRequests"}},
                {"match": {"tokenPrefix": "aa"}, "answer": {"status": 400, "reason": "DeviceTokenNotForTopic"}},
                {"match": {"topic": "com.example.other", "every": 2}, "answer": {"status": 500, "reason": "InternalServerError"}},
                {"match": {"from": 7, "to": 7}, "answer": {"status": 503, "reason": "Shutdown"}},
                {"match": {"during": [5, 6]}, "answer": {"status": 503, "reason": "ServiceUnavailable", "delay": 0.001}}
            ]}
            """)
        defer { apns.stop() }
        #expect(try outcome(apns) == "429 {\"reason\":\"TooManyRequests\"}")
        #expect(try outcome(apns, "AAbb") == "400 {\"reason\":\"DeviceTokenNotForTopic\"}")
        #expect(try outcome(apns, "bb", topic: "com.example.other") == "200")
        #expect(try outcome(apns, "bb", topic: "com.example.other") == "500 {\"reason\":\"InternalServerError\"}")
        #expect(try outcome(apns, "bb", topic: "com.example.other") == "200")
        #expect(try outcome(apns, "bb") == "200")
        #expect(try outcome(apns, "bb") == "503 {\"reason\":\"Shutdown\"}")
        clock.advance(seconds: 5)
        #expect(try outcome(apns, "bb") == "503 {\"reason\":\"ServiceUnavailable\"}")
        clock.advance(seconds: 1)
        #expect(try outcome(apns, "bb") == "200")
    }

    @Test func `a raw answer has only what the script gives`() throws {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "aa"}, "answer": {"raw": {"status": "410", "headers": [["x-y", "z"]], "body": "{\\"rea"}}},
                {"match": {"token": "bb"}, "answer": {"raw": {"status": "500", "body": "0123456789", "repeated": 20000}}},
                {"match": {"token": "cc"}, "answer": {"raw": {"status": "200", "body": "x", "end": "reset"}}}
            ]}
            """)
        defer { apns.stop() }
        let truncated = try apns.send(Fixture.request { $0.path = "/3/device/aa" })
        #expect(truncated.status == 410)
        #expect(truncated.headers == ["x-y": "z"])
        #expect(truncated.body == "{\"rea")
        #expect(try apns.send(Fixture.request { $0.path = "/3/device/bb" }).body.utf8.count == 200_000)
        #expect(try apns.send(Fixture.request { $0.path = "/3/device/cc" }).exit == 92)
    }

    @Test func `resets, closed connections and GOAWAYs`() throws {
        let apns: FakeAPNs = try start(
            """
            {"rules": [
                {"match": {"token": "aa"}, "answer": {"reset": 2}},
                {"match": {"token": "bb"}, "answer": {"close": true}},
                {"match": {"token": "cc"}, "answer": {"goAway": {"last": "processed", "reason": "BadCertificate"}}},
                {"match": {"token": "dd"}, "answer": {"goAway": {"closing": "at-once", "code": 1}}}
            ]}
            """)
        defer { apns.stop() }
        #expect(try apns.send(Fixture.request { $0.path = "/3/device/aa" }).exit == 92)
        #expect(try outcome(apns, "bb") == "none")
        #expect(try outcome(apns, "cc") == "200")
        #expect(try outcome(apns, "dd") == "none")
        #expect(apns.records.count(0, "reset") == 1)
        #expect(apns.records.count(0, "close") == 1)
    }

    @Test(arguments: [
        ("{", "the script"),
        ("{\"rulez\": []}", "unknown key \"rulez\", expected some of rules, deaths, settings"),
        ("{\"rules\": [{}]}", "at rules[0]: needs \"answer\""),
        (
            "{\"rules\": [{\"match\": {\"tokens\": \"aa\"}, \"answer\": {\"never\": true}}]}",
            "at rules[0].match: unknown key \"tokens\""
        ),
        ("{\"rules\": [{\"answer\": {}}]}", "at rules[0].answer: expected one of status, raw"),
        ("{\"rules\": [{\"answer\": {\"status\": 429, \"never\": true}}]}", "expected one of status, raw"),
        ("{\"rules\": [{\"answer\": {\"status\": \"429\"}}]}", "at rules[0].answer.status"),
        ("{\"rules\": [{\"answer\": {\"reset\": 1, \"reason\": \"x\"}}]}", "belongs to \"status\""),
        ("{\"rules\": [{\"match\": {\"every\": 0}, \"answer\": {\"never\": true}}]}", "is 0, expected 1 or more"),
        ("{\"rules\": [{\"match\": {\"during\": [2, 1]}, \"answer\": {\"never\": true}}]}", "expected [from, to]"),
        (
            "{\"rules\": [{\"answer\": {\"goAway\": {\"last\": \"x\"}}}]}",
            "expected processed, not-processed, seen, maximum, or a stream's number"
        ),
        (#"{"rules": [{"answer": {"goAway": {"last": -1}}}]}"#, "is -1, expected 0 to 2147483647"),
        (
            #"{"rules": [{"answer": {"goAway": {"notice": "soon"}}}]}"#,
            "is \"soon\", expected seconds, or round-trip"
        ),
        (#"{"rules": [{"answer": {"goAway": {"closing": "x"}}}]}"#, "expected after-streams, at-once or never"),
        (#"{"rules": [{"answer": {"never": true, "cut": {}}}]}"#, "belongs to \"status\" or \"raw\""),
        (#"{"rules": [{"answer": {"status": 200, "cut": {"after": -1}}}]}"#, "is -1, expected 0 or more"),
        (#"{"rules": [{"answer": {"status": 200, "cut": {"after": "x"}}}]}"#, "expected bytes of the body, or end"),
        (#"{"rules": [{"answer": {"status": 200, "cut": {"by": "x"}}}]}"#, "expected reset or close"),
        (#"{"rules": [{"answer": {"status": 200, "cut": {"by": "close", "code": 8}}}]}"#, "belongs to \"reset\""),
        (#"{"rules": [{"answer": {"status": 200, "informational": [200]}}]}"#, "expected a list of 100 to 199"),
        (#"{"rules": [{"answer": {"status": 200, "trailers": [["x"]]}}]}"#, "expected pairs of a name and a value"),
        (
            #"{"rules": [{"answer": {"status": 200, "settings": {"after": 1, "initialWindow": 1}}}]}"#,
            "no \"after\""
        ),
        (
            #"{"settings": [{"initialWindow": -1}]}"#,
            "at settings[0].initialWindow: is -1, expected 0 to 2147483647"
        ),
        (#"{"settings": [{"after": 1}]}"#, "expected \"maximumStreams\" or \"initialWindow\""),
        ("{\"deaths\": [{\"after\": 1}]}", "expected either \"token\" or \"share\""),
        ("{\"deaths\": [{\"share\": 2}]}", "is 2.0, expected 0 to 1"),
        ("{\"deaths\": [{\"token\": \"aa\", \"at\": 1, \"after\": 1}]}", "expected either \"at\" or \"after\""),
    ]) func `a mistake in a script is refused, with its place and what was expected`(
        _ json: String, _ complaint: String
    ) throws {
        let failure = #expect(throws: FakeScriptFailure.self) { try FakeScript(json: json) }
        #expect(failure?.description.contains(complaint) == true, "\(failure?.description ?? "")")
    }

    @Test func `the example in the documentation is a script`() throws {
        let page = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
            .appendingPathComponent("../../docs/reference/fake-apns.md").standardized
        let text = try String(contentsOf: page, encoding: .utf8)
        let examples = text.components(separatedBy: "```json\n").dropFirst().map {
            $0.components(separatedBy: "```")[0]
        }
        #expect(examples.count == 4)
        for example in examples { _ = try FakeScript(json: example) }
    }
}
