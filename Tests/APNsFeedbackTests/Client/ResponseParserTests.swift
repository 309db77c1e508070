import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct ResponseParserTests {
    private func answer(_ fields: [(String, String)], body: String = "") -> ResponseParser {
        var answer = ResponseParser()
        for (name, value) in fields { answer.take(name: Array(name.utf8).span, value: Array(value.utf8).span) }
        _ = answer.take(piece: Array(body.utf8).span)
        return answer
    }

    @Test func `status, identifiers and body are read`() {
        let found = answer(
            [(":status", "410"), ("apns-id", "abc"), ("apns-unique-id", " d e "), ("date", "x")], body: "{}")
        #expect(found.answer == PushResponse(status: 410, body: "{}", apnsID: "abc", uniqueID: "d e"))
    }

    @Test func `interim answers and their headers are ignored`() {
        #expect(answer([(":status", "103"), ("apns-id", "early")]).answer == nil)
        let found = answer([(":status", "103"), ("apns-id", "early"), (":status", "200")])
        #expect(found.answer == PushResponse(status: 200))
    }

    @Test(arguments: ["", "x", "-50", "20", "2000", "99999999999999999999", "\u{0}\u{1}\u{2}", "２００"])
    func `an invalid status is refused`(_ text: String) {
        #expect(answer([(":status", text)]).answer == nil)
    }

    /// libcurl reads years that no clock has.
    @Test(
        arguments: [
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777), ("Sun, 06 Nov 2000000000 08:49:37 GMT", nil),
            ("yesterday", nil),
            ("Sun, 06 Nov 1900 08:49:37 GMT", nil), ("", nil),
        ] as [(String, Int64?)])
    func `the date is read, or is none`(text: String, seconds: Int64?) {
        let found = answer([(":status", "200"), ("date", text)])
        #expect(found.answer?.answeredAt == seconds.map { Instant(microseconds: $0 * 1_000_000) })
    }

    @Test func `an identifier is cut to 100 bytes of printable ASCII`() {
        let found = answer([(":status", "200"), ("apns-id", "é\u{7}x" + String(repeating: "y", count: 200))])
        #expect(found.answer?.apnsID == "x" + String(repeating: "y", count: 99))
    }

    @Test func `the first 4 KiB of a body are kept, and reading stops after 1 MiB`() {
        var answer = ResponseParser()
        let piece = [UInt8](repeating: 0xff, count: 1 << 20)
        #expect(answer.take(piece: piece.span) == true)
        #expect(answer.take(piece: [0].span) == false)
        #expect(answer.body.count == 4096)
    }

    @Test func `invalid UTF-8 is replaced`() {
        var answer = answer([(":status", "400")])
        #expect(answer.take(piece: [0x41, 0xff].span) == true)
        #expect(answer.answer?.body == "A\u{fffd}")
    }
}
