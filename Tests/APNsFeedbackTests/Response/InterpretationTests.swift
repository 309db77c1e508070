import Foundation
import LedgerTestSupport
import Testing
import TokenModel

@testable import APNsFeedback

private let queuedAt = Instant(microseconds: 1_795_000_000_000_000)
private let sentAt = Instant(microseconds: 1_794_999_990_000_000)
private let address = TokenAddress(
    environment: .production, topic: Topic("com.example.app")!, token: DeviceToken(hex: "00ff10aa")!)

private func result(_ status: Int32?, _ body: String? = nil, _ change: (inout SendResult) -> Void = { _ in })
    -> SendResult
{
    var result = SendResult(
        environment: "production", topic: "com.example.app", token: "00FF10aa", status: status.map(String.init),
        body: body, apnsID: nil,
        sentAt: sentAt, queuedAt: queuedAt)
    change(&result)
    return result
}

private func verdict(_ status: Int32?, _ body: String? = nil, _ change: (inout SendResult) -> Void = { _ in })
    -> Verdict
{
    Interpretation.verdict(on: result(status, body, change))
}

private func error(_ verdict: Verdict) -> String? {
    if case .unintelligible(let error) = verdict { error } else { nil }
}

@Suite struct `Interpretation of APNs responses` {
    @Test func `a 200 is accepted whatever else the row contains`() {
        #expect(verdict(200) == .accepted)
        #expect(
            verdict(200, "garbage") { $0 = SendResult(token: "zz", status: "200", queuedAt: queuedAt) } == .accepted)
    }

    @Test(arguments: [" 200", "200\r\n", "\t200 "])
    func `blanks around the status do not matter`(status: String) {
        #expect(verdict(200) { $0.status = status } == .accepted)
    }

    @Test(arguments: [
        ("failed", "'failed'"), ("410 Gone", "'410 Gone'"), ("410.0", "'410.0'"), ("+410", "'+410'"),
        ("0410", "'0410'"),
        ("٤١٠", "'٤١٠'"), ("4 10", "'4 10'"), (" ", "' '"), ("600", "'600'"), ("99", "'99'"), ("-1", "'-1'"),
        ("00fc13adff785122", "'00fc13ad'..."),
    ])
    func `a status that is no HTTP status is unintelligible, and only its beginning is shown`(
        status: String, shown: String
    ) {
        #expect(
            error(verdict(410) { $0.status = status }) == "status is \(shown), expected an HTTP status from 100 to 599")
    }

    @Test(arguments: ["Unregistered", "ExpiredToken", "SomethingNew"])
    func `a 410 with any reason and a timestamp makes its token stale as of the timestamp`(reason: String) {
        let body = #"{"reason":"\#(reason)","timestamp":1794000000123}"#
        #expect(verdict(410, body) == .stale(address, at: Instant(microseconds: 1_794_000_000_123_000), reason: reason))
    }

    @Test(
        arguments: ["BadDeviceToken", "DeviceTokenNotForTopic", "ExpiredToken", "Unregistered"], [400, 403, 404, 413])
    func `a reason about the token makes it suspect as of the send, whatever the status`(reason: String, status: Int32)
    {
        #expect(verdict(status, #"{"reason":"\#(reason)"}"#) == .suspect(address, at: sentAt, reason: reason))
    }

    @Test(arguments: [
        (400, "BadTopic"), (400, "MissingTopic"), (400, "TopicDisallowed"), (400, "MissingDeviceToken"),
        (400, "DuplicateHeaders"),
        (400, "BadCollapseId"), (400, "BadExpirationDate"), (400, "BadMessageId"), (400, "BadPriority"),
        (400, "InvalidPushType"),
        (400, "PayloadEmpty"), (403, "BadCertificate"), (403, "BadCertificateEnvironment"), (403, "Forbidden"),
        (403, "InvalidProviderToken"), (403, "MissingProviderToken"), (403, "BadEnvironmentKeyIdInToken"),
        (403, "BadEnvironmentKeyInToken"), (403, "ExpiredProviderToken"), (403, "UnrelatedKeyIdInToken"),
        (404, "BadPath"),
        (405, "MethodNotAllowed"), (413, "PayloadTooLarge"), (429, "TooManyProviderTokenUpdates"),
        (400, "NeverHeardOf"), (418, "Teapot"), (400, "InvalidProviderToken"), (403, "PayloadTooLarge"),
    ])
    func `the sender's faults do not affect the token`(status: Int32, reason: String) {
        #expect(verdict(status, #"{"reason":"\#(reason)"}"#) == .sendersFault(reason: reason))
    }

    @Test(arguments: [
        (400, "IdleTimeout"), (429, "TooManyRequests"), (429, "New"), (500, "InternalServerError"),
        (503, "ServiceUnavailable"),
        (503, "Shutdown"), (599, "New"), (400, "ServiceUnavailable"), (400, "TooManyRequests"), (500, "BadDeviceToken"),
    ])
    func `transient errors do not affect the token`(status: Int32, reason: String) {
        #expect(verdict(status, #"{"reason":"\#(reason)"}"#) == .transient(reason: reason))
    }

    @Test func `every HTTP status has a verdict, and no other status does`() {
        for status in Int32(100)...599 { #expect(error(verdict(status)) == nil) }
        for status in [Int32.min, -1, 0, 99, 600, 999, .max] {
            #expect(error(verdict(status))?.contains("HTTP status") == true)
        }
        #expect(error(verdict(nil)) == "status is missing, expected the HTTP status that APNs answered")
        #expect(error(verdict(410) { $0.status = "" }) == error(verdict(nil)))
    }

    static let withoutBody: [String?] = [nil, "", " ", "\n\t "]
    static let foreign: [String] = [
        "null", "[]", "{", #"{"reason":"Unregist"#, #"{"reason":"Unregistered","timestamp"#, "<html>", "\u{0}",
        #"{"reason":"Unregistered","timestamp":"#, "1794000000123", #""Replaced""#, "Replaced", "Unregistered 410",
        #"["Unregistered",1794000000123]"#, #"[{"reason":"Unregistered","timestamp":1794000000123}]"#,
        #"{"reason":"Unregistered","timestamp":1794000000123}x"#, "\"Unregistered", "410 Gone",
    ]
    static let withoutReason: [String] = [
        "{}", #"{"timestamp":null}"#, #"{"timestamp":1794000000123}"#, #"{"reason":null,"timestamp":1794000000123}"#,
        #"{"reason":"","timestamp":1794000000123}"#, #"{"reason":7,"timestamp":1794000000123}"#,
        #"{"reason":{"a":[1]},"timestamp":1794000000123,"more":[[]]}"#,
        #"{"Reason":"Unregistered","timestamp":1794000000123}"#,
    ]
    static let withoutTimestamp: [String] = [
        #"{"reason":"Unregistered"}"#, #"{"reason":"Unregistered","timestamp":null}"#,
        #"{"reason":"Unregistered","timestamp":"1794000000123"}"#,
        #"{"reason":"Unregistered","timestamp":1794000000123.5}"#,
        #"{"reason":"Unregistered","timestamp":true}"#, #"{"reason":"Unregistered","timestamp":{}}"#,
        #"{"reason":"Unregistered","timestamp":"soon"}"#, #"{"reason":"Unregistered","timestamp":[1794000000123]}"#,
        #"{"reason":"Unregistered","timestamp":"99999999999999"}"#, #"{"reason":"Unregistered","timestamp":1.5}"#,
        #"{"reason":"Unregistered","Timestamp":1794000000123}"#,
    ]

    @Test func `a 410 that APNs does not send makes its token suspect as of the send, and says what is missing`() {
        for (bodies, reason) in [
            (Self.withoutBody, "410 without a body"), (Self.foreign, "410 with a body that is not from APNs"),
            (Self.withoutReason, "410 without a reason"), (Self.withoutTimestamp, "410 without a timestamp"),
        ] {
            for body in bodies {
                #expect(verdict(410, body) == .suspect(address, at: sentAt, reason: reason), "\(body ?? "nil")")
                #expect(Verdict.countable(reason) == reason)
            }
        }
        #expect(Verdict.DoubtfulGone.allCases.count == 4)
    }

    @Test(arguments: [
        #"{"reason":"Gone","timestamp":1794000000123.0}"#, #"{"reason":"Gone","timestamp":1.794000000123e12}"#,
        #"{"reason":"Gone","timestamp":1794000000123,"timestamp":1}"#,
        #" { "timestamp" : 1794000000123 , "reason" : "Gone" } "#,
        #"{"more":[[]],"reason":"Gone","timestamp":1794000000123}"#,
    ])
    func `any JSON object with a reason and an integer timestamp is read`(body: String) {
        #expect(verdict(410, body) == .stale(address, at: Instant(microseconds: 1_794_000_000_123_000), reason: "Gone"))
    }

    @Test func `a body of a megabyte is treated like any other`() {
        let pad = String(repeating: "x", count: 1_000_000)
        for body in [
            pad, String(repeating: "[", count: 1_000_000), #"{"pad":""# + pad,
            String(repeating: "{\"a\":", count: 100_000),
        ] {
            #expect(
                verdict(410, body)
                    == .suspect(address, at: sentAt, reason: "410 with a body that is not from APNs"))
        }
        #expect(
            verdict(410, #"{"pad":""# + pad + #"","reason":"Gone","timestamp":1794000000123}"#)
                == .stale(address, at: Instant(microseconds: 1_794_000_000_123_000), reason: "Gone"))
    }

    @Test(arguments: [
        "0", "-1", "-1794000000123", "1199145599999", "1794000000", "-9223372036854775808", "-1e300",
    ])
    func `a timestamp from before APNs existed is not understood`(timestamp: String) {
        for body in [#"{"reason":"Unregistered","timestamp":\#(timestamp)}"#, #"{"timestamp":\#(timestamp)}"#] {
            #expect(error(verdict(410, body))?.contains("before 2008") == true)
        }
    }

    @Test func `the earliest timestamp that is understood is in 2008`() {
        #expect(
            verdict(410, #"{"reason":"Gone","timestamp":1199145600000}"#)
                == .stale(address, at: .beforeAPNs, reason: "Gone"))
    }

    @Test func `a timestamp up to a day ahead counts as now, a later one is not understood`() {
        let now = queuedAt.microseconds / 1000
        for ahead in [0, 1, 86_400_000] {
            #expect(
                verdict(410, #"{"reason":"Gone","timestamp":\#(now + Int64(ahead))}"#)
                    == .stale(address, at: queuedAt, reason: "Gone"))
        }
        for absurd in ["\(now + 86_400_001)", "9223372036854775807", "1e300", "99999999999999"] {
            #expect(
                error(verdict(410, #"{"reason":"Gone","timestamp":\#(absurd)}"#))?.contains(
                    "more than a day in the future")
                    == true, "\(absurd)")
        }
    }

    /// In JSON, usual and not, and alone.
    @Test(arguments: [
        "badDeviceToken", ":bad_device_token", "bad_device_token", "BAD_DEVICE_TOKEN", "BADDEVICETOKEN",
        " BadDeviceToken ",
        "Optional[BadDeviceToken]", "Some(BadDeviceToken)",
    ])
    func `a reason of Apple counts as libraries of other languages spell it`(reason: String) {
        for body in [#"{"reason":"\#(reason)"}"#, #"{ "reason": "\#(reason)" }"#, reason, "'\(reason)'"] {
            #expect(verdict(400, body) == .suspect(address, at: sentAt, reason: "BadDeviceToken"), "\(body)")
        }
        // Others stay as they are.
        #expect(verdict(400, #"{"reason":"new_reason"}"#) == .sendersFault(reason: "new_reason"))
    }

    @Test(arguments: [
        "BadDeviceToken", "\"BadDeviceToken\"", "'BadDeviceToken'", " BadDeviceToken\r\n", "\t\"BadDeviceToken\" ",
    ])
    func `a bare reason keeps its verdict`(body: String) {
        #expect(verdict(400, body) == .suspect(address, at: sentAt, reason: "BadDeviceToken"))
        let gone = body.replacing("BadDeviceToken", with: "Unregistered")
        #expect(verdict(410, gone) == .suspect(address, at: sentAt, reason: "Unregistered"), "it has no timestamp")
        #expect(
            verdict(429, body.replacing("BadDeviceToken", with: "TooManyProviderTokenUpdates"))
                == .sendersFault(reason: "TooManyProviderTokenUpdates"))
        #expect(
            verdict(400, body.replacing("BadDeviceToken", with: "IdleTimeout")) == .transient(reason: "IdleTimeout"))
    }

    @Test(arguments: [
        "BadDeviceTokens", "bad device token", "\"\"", "\"", "400 BadDeviceToken", "[\"BadDeviceToken\"]",
    ])
    func `text around a bare reason makes it unreadable`(body: String) {
        #expect(verdict(400, body) == .sendersFault(reason: nil))
    }

    @Test func `an undocumented reason of a 410 is recognized`() {
        func undocumented(_ reason: String) -> String? {
            Interpretation.undocumentedReason(of: verdict(410, #"{"reason":"\#(reason)","timestamp":1794000000123}"#))
        }
        #expect(undocumented("Unregistered") == nil && undocumented("ExpiredToken") == nil)
        #expect(undocumented("Replaced") == "Replaced")
        #expect(Interpretation.undocumentedReason(of: verdict(410)) == nil)
        #expect(Interpretation.undocumentedReason(of: verdict(400, #"{"reason":"BadDeviceToken"}"#)) == nil)
    }

    @Test func `a missing sent_at means five minutes before the insert`() {
        let assumed = queuedAt.advanced(byMicroseconds: -300_000_000)
        #expect(verdict(410) { $0.sentAt = nil } == .suspect(address, at: assumed, reason: "410 without a body"))
        #expect(
            verdict(400, #"{"reason":"BadDeviceToken"}"#) { $0.sentAt = nil }
                == .suspect(address, at: assumed, reason: "BadDeviceToken"))
    }

    @Test func `a sent_at in the future counts as the insert, and an infinite one is not understood`() {
        #expect(
            verdict(410) { $0.sentAt = Instant(microseconds: .max - 1) }
                == .suspect(address, at: queuedAt, reason: "410 without a body"))
        for infinite in [Instant.distantFuture, .distantPast] {
            #expect(
                error(verdict(410, #"{"reason":"Gone","timestamp":1794000000123}"#) { $0.sentAt = infinite })?.contains(
                    "infinite")
                    == true)
        }
    }

    @Test func `a sent_at from before APNs is refused only for suspects`() {
        let epoch = Instant(microseconds: 0)
        #expect(error(verdict(410) { $0.sentAt = epoch })?.contains("before 2008") == true)
        #expect(error(verdict(410, #"{"reason":"Gone","timestamp":1794000000123}"#) { $0.sentAt = epoch }) == nil)
        #expect(verdict(503) { $0.sentAt = epoch } == .transient(reason: nil))
    }

    @Test(arguments: [
        "", " ", "0", "0g", "zz", "0x0", "00,", "<00", "0-0", "é0", "00ff1", String(repeating: "00", count: 513),
    ])
    func `a token in no known form is not understood`(token: String) {
        #expect(error(verdict(410) { $0.token = token })?.hasPrefix("device token") == true)
    }

    @Test func `a token has 1 to 512 bytes, in upper or lower case`() {
        for hex in ["0A", "0a", String(repeating: "Ff", count: 512)] {
            #expect(error(verdict(410) { $0.token = hex }) == nil)
        }
        #expect(verdict(410) { $0.token = "00FF10AA" } == verdict(410) { $0.token = "00ff10aa" })
        for text in TokenSpellings.all {
            #expect(verdict(410) { $0.token = text } == verdict(410) { $0.token = TokenSpellings.token }, "\(text)")
        }
    }

    @Test func `an error never shows a whole token`() {
        let token = String(repeating: "ab", count: 32)
        for spoilt in [token + "g", token + " a", "," + token] {
            #expect(error(verdict(410) { $0.token = spoilt })?.contains("ababababab") == false)
        }
    }

    @Test func `a topic is required, and a valid environment`() {
        #expect(error(verdict(410) { $0.topic = nil })?.hasPrefix("topic is missing") == true)
        #expect(error(verdict(410) { $0.topic = "" })?.hasPrefix("topic is missing") == true)
        #expect(error(verdict(410) { $0.topic = String(repeating: "t", count: 513) })?.contains("513 bytes") == true)
        #expect(error(verdict(410) { $0.topic = "com.example app" })?.hasPrefix("topic has a blank") == true)
        for environment in ["", "Production", "development", "prod "] {
            #expect(error(verdict(410) { $0.environment = environment })?.hasPrefix("environment is") == true)
        }
        #expect(verdict(410) { $0.environment = nil } == verdict(410))
    }

    @Test func `a reason is cleaned before it is stored`() {
        #expect(verdict(410, #"{"reason":"a\u0000b","timestamp":1794000000123}"#).reason == "a?b")
        let long = String(repeating: "x", count: 5000)
        #expect(verdict(410, #"{"reason":"\#(long)","timestamp":1794000000123}"#).reason?.count == 100)
    }

    @Test func `any bytes have a verdict, and only a 410 or a suspect reason affects a token`() {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let pieces = [
            "{", "}", "[", "]", ":", ",", "\"", "reason", "timestamp", "Unregistered", "BadDeviceToken",
            "1794000000123", "-", ".", "e", "\\",
            "\\u0000", " ", "null", "é", "\u{0}", "\u{FFFF}", "9999999999999999999999",
        ]
        for _ in 0..<20_000 {
            let body = (0..<Int.random(in: 0...14, using: &chance)).map { _ in pieces.randomElement(using: &chance)! }
                .joined()
            let status = Bool.random(using: &chance) ? 410 : Int32.random(in: -10...700, using: &chance)
            let random = SendResult(
                environment: [nil, "production", "sandbox", "x"].randomElement(using: &chance)!,
                topic: [nil, "", "t"].randomElement(using: &chance)!,
                token: [nil, "00", "0", "xyz"].randomElement(using: &chance)!,
                status: String(status), body: body,
                sentAt: [nil, sentAt, .distantPast, .distantFuture].randomElement(using: &chance)!,
                queuedAt: queuedAt)
            switch Interpretation.verdict(on: random) {
            case .stale(_, let at, let reason):
                #expect(
                    status == 410 && body.contains("reason") && body.contains("1794000000123") && at <= queuedAt
                        && at >= .beforeAPNs && !reason.isEmpty
                        && !reason.unicodeScalars.contains("\u{0}"))
            case .suspect(_, let at, _):
                #expect((status == 410 || (status == 400 && body.contains("BadDeviceToken"))) && at <= queuedAt)
            case .accepted: #expect(status == 200)
            case .sendersFault, .transient, .unintelligible: #expect(status != 200)
            }
        }
    }

    @Test func `the fast path reads APNs' bodies exactly as the JSON decoder does`() throws {
        #expect(
            ResponseBody.usual(#"{"reason":"Unregistered","timestamp":1508249865488}"#)
                == ResponseBody.decoded(#"{"reason":"Unregistered","timestamp":1508249865488}"#))
        #expect(ResponseBody.usual(#"{"reason":"BadDeviceToken"}"#)?.reason == "BadDeviceToken")
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let strays = Array(#"{}[]:,"\ 0159-+.eEaZé@[`"#) + ["\u{0}", "\n"]
        var read = 0
        for _ in 0..<20_000 {
            var body = Array(
                Bool.random(using: &chance)
                    ? #"{"reason":"Gone"}"#
                    : "{\"reason\":\"Gone\",\"timestamp\":\(Int64.random(in: 0...Int64.max, using: &chance) >> Int64.random(in: 0...62, using: &chance))}"
            )
            for _ in 0..<Int.random(in: 0...2, using: &chance) {
                let place = body.indices.randomElement(using: &chance)!
                switch Int.random(in: 0...2, using: &chance) {
                case 0: body.remove(at: place)
                case 1: body.insert(strays.randomElement(using: &chance)!, at: place)
                default: body[place] = strays.randomElement(using: &chance)!
                }
                if body.isEmpty { break }
            }
            let text = String(body)
            guard let usual = ResponseBody.usual(text) else { continue }
            read += 1
            #expect(usual == ResponseBody.decoded(text), "\(text), seed \(seed)")
        }
        #expect(read > 5000)
    }
}
