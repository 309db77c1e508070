import FakeAPNs
import Foundation
import TestThreads
import Testing

/// A mistake, and the response to it.
struct Mistake: CustomTestStringConvertible, Sendable {
    let testDescription: String
    let status: Int
    let reason: String
    let change: @Sendable (inout CurlRequest) -> Void

    init(_ name: String, _ status: Int, _ reason: String, _ change: @escaping @Sendable (inout CurlRequest) -> Void) {
        testDescription = name
        self.status = status
        self.reason = reason
        self.change = change
    }

    static func header(_ name: String, _ value: String?, _ reason: String) -> Mistake {
        Mistake("\(name): \(value ?? "missing")", 400, reason) { $0.headers = [(name, value)] }
    }

    static func background(_ payload: String, _ reason: String, priority: String? = "5") -> Mistake {
        Mistake("background, priority \(priority ?? "missing"), \(payload)", 400, reason) {
            $0.headers = [("apns-push-type", "background"), ("apns-priority", priority)]
            $0.body = payload
        }
    }

    static func payload(_ payload: String) -> Mistake {
        Mistake("payload \(payload)", 400, "PayloadEmpty") { $0.body = payload }
    }

    static let all: [Mistake] = [
        Mistake("GET", 405, "MethodNotAllowed") { $0.method = "GET" },
        Mistake("another path", 404, "BadPath") { $0.path = "/4/device/aa" },
        Mistake("a longer path", 404, "BadPath") { $0.path += "/aa" },
        Mistake("no token", 400, "MissingDeviceToken") { $0.path = "/3/device/" },
        Mistake("no token and no slash", 400, "MissingDeviceToken") { $0.path = "/3/device" },
        Mistake("a token that is no hex", 400, "BadDeviceToken") { $0.path = "/3/device/xyz0" },
        Mistake("half a byte", 400, "BadDeviceToken") { $0.path = "/3/device/abc" },
        Mistake("a token of another environment", 400, "BadDeviceToken") { $0.path = "/3/device/ffff" },
        .header("apns-topic", nil, "MissingTopic"),
        .header("apns-topic", "", "MissingTopic"),
        .header("apns-topic", "com.example.other", "TopicDisallowed"),
        .header("apns-topic", "no topic", "BadTopic"),
        .header("apns-push-type", "shout", "InvalidPushType"),
        .header("apns-priority", "7", "BadPriority"),
        .header("apns-priority", "high", "BadPriority"),
        .header("apns-expiration", "tomorrow", "BadExpirationDate"),
        .header("apns-expiration", "-1", "BadExpirationDate"),
        .header("apns-collapse-id", String(repeating: "c", count: 65), "BadCollapseId"),
        .header("apns-id", "69E4908D-5248-4D9C-B91C-3C9C86D44E1B", "BadMessageId"),
        .header("apns-id", "1", "BadMessageId"),
        Mistake("two topics", 400, "DuplicateHeaders") {
            $0.headers = [("apns-topic", "com.example.app"), ("apns-topic", "com.example.app")]
        },
        Mistake("two priorities", 400, "DuplicateHeaders") {
            $0.headers = [("apns-priority", "5"), ("apns-priority", "10")]
        },
        .payload(""), .payload("Hello"), .payload("[]"), .payload("{\"aps\":{}"), .payload("{\"aps\":{}} {}"),
        .payload("{\"a\":01}"), .payload("{\"a\":\"\\x\"}"), .payload("{\"a\":1,}"), .payload("{'a':1}"),
        Mistake("4097 bytes", 413, "PayloadTooLarge") { $0.body = Mistake.payload(ofBytes: 4097) },
        Mistake("200,000 bytes", 413, "PayloadTooLarge") {
            $0.body = ""
            let file = Fixture.authority.folder + "/large.json"
            try? Mistake.payload(ofBytes: 200_000).write(toFile: file, atomically: true, encoding: .utf8)
            $0.arguments = ["--data-binary", "@" + file]
        },
        Mistake("5121 bytes of VoIP", 413, "PayloadTooLarge") {
            $0.headers = [("apns-push-type", "voip")]
            $0.body = Mistake.payload(ofBytes: 5121)
        },
        .background("{\"aps\":{\"content-available\":1}}", "BadPriority", priority: "10"),
        .background("{\"aps\":{\"content-available\":1}}", "BadPriority", priority: "1"),
        .background("{\"aps\":{\"content-available\":1}}", "BadPriority", priority: nil),
        .background("{\"aps\":{}}", "InvalidPushType"),
        .background("{\"content-available\":1}", "InvalidPushType"),
        .background("{\"aps\":{\"content-available\":10}}", "InvalidPushType"),
        .background("{\"aps\":{\"content-available\":1,\"badge\":1}}", "InvalidPushType"),
        .background("{\"aps\":{\"content-available\":1,\"alert\":\"Hello\"}}", "InvalidPushType"),
    ]

    static func payload(ofBytes count: Int) -> String {
        "{\"a\":\"" + String(repeating: "b", count: count - 8) + "\"}"
    }
}

/// A valid request.
struct Acceptable: CustomTestStringConvertible, Sendable {
    let testDescription: String
    let change: @Sendable (inout CurlRequest) -> Void

    static func headers(_ headers: [(name: String, value: String?)], _ body: String? = nil) -> Acceptable {
        Acceptable(testDescription: headers.map { "\($0.name): \($0.value ?? "missing")" }.joined(separator: ", ")) {
            $0.headers = headers
            if let body { $0.body = body }
        }
    }

    static let all: [Acceptable] = [
        .headers([("apns-push-type", nil)]),
        .headers([("apns-priority", "10")]), .headers([("apns-priority", "5")]), .headers([("apns-priority", "1")]),
        .headers([("apns-expiration", "0")]), .headers([("apns-expiration", "1795000000")]),
        .headers([("apns-collapse-id", String(repeating: "c", count: 64))]),
        .headers(
            [("apns-push-type", "background"), ("apns-priority", "5")],
            "{ \"aps\" : { \"content-available\" : 1 }, \"k\": [1] }"),
        .headers([("apns-push-type", "voip")], Mistake.payload(ofBytes: 5120)),
        .headers([("apns-push-type", "liveactivity")], "{\"aps\":{\"x\":[-1.5e+3,null,true,{\"a\":\"\\u00e4\\n\"}]}}"),
        Acceptable(testDescription: "4096 bytes") { $0.body = Mistake.payload(ofBytes: 4096) },
        Acceptable(testDescription: "a token in upper case") {
            $0.path = "/3/device/" + CurlRequest.token.uppercased()
        },
    ]
}

@Suite("Requests are checked as APNs checks them", .ownThread)
struct ValidationTests {
    private func start() throws -> FakeAPNs {
        var options = FakeOptions(Fixture.authority)
        options.topics = ["com.example.app"]
        options.knownTokens = [CurlRequest.token]
        return try FakeAPNs.start(options)
    }

    @Test(arguments: Mistake.all) func `a mistake gets Apple's status and reason`(_ mistake: Mistake) throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let answer = try apns.send(Fixture.request(mistake.change))
        #expect(answer.status == mistake.status)
        #expect(answer.body == "{\"reason\":\"\(mistake.reason)\"}")
        #expect(answer.headers["apns-id"]?.wholeMatch(of: /[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/) != nil)
        #expect(apns.records.count(mistake.status, mistake.reason) == 1)
    }

    @Test(arguments: Acceptable.all) func `valid requests are accepted, with an empty body`(_ acceptable: Acceptable)
        throws
    {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let answer = try apns.send(Fixture.request(acceptable.change))
        #expect(answer.status == 200)
        #expect(answer.body == "")
    }

    @Test func `the request's apns-id comes back, and is counted`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let id = "69e4908d-5248-4d9c-b91c-3c9c86d44e1b"
        for _ in 0..<2 {
            let answer = try apns.send(Fixture.request { $0.headers = [("apns-id", id)] })
            #expect(answer.headers["apns-id"] == id)
            #expect(answer.headers["apns-unique-id"] == nil)
        }
        #expect(apns.records.count(of: id) == 2)
        #expect(apns.records.identifiers == [id: 2])
    }

    @Test func `the sandbox answers with apns-unique-id as well`() throws {
        var options = FakeOptions(Fixture.authority)
        options.sandbox = true
        let apns: FakeAPNs = try FakeAPNs.start(options)
        defer { apns.stop() }
        #expect(try apns.send(Fixture.request()).headers["apns-unique-id"]?.count == 36)
    }

    @Test func `a record has the request unchanged`() throws {
        let apns: FakeAPNs = try start()
        defer { apns.stop() }
        let token = CurlRequest.token.uppercased()
        _ = try apns.send(
            Fixture.request {
                $0.path = "/3/device/" + token
                $0.headers = [("apns-priority", "5"), ("apns-expiration", "9"), ("apns-collapse-id", "c")]
            })
        let exchange = try #require(apns.records.exchanges.first)
        #expect(exchange.outcome == FakeOutcome(200))
        #expect(exchange.request.token == token)
        #expect(exchange.request.topic == "com.example.app")
        #expect(exchange.request.pushType == "alert")
        #expect(exchange.request.priority == "5")
        #expect(exchange.request.expiration == "9")
        #expect(exchange.request.collapseID == "c")
        #expect(!exchange.request.hasOwnID)
        #expect(exchange.request.providerToken != nil)
        #expect(String(decoding: exchange.request.payload, as: UTF8.self) == CurlRequest().body)
        #expect(exchange.request.connection == 1)
        #expect(exchange.request.stream == 1)
        #expect(exchange.request.ordinal == 1)
    }
}
