import Testing

@testable import APNsFeedback

@Suite struct ResponseParserTests {
    private func answer(_ lines: [String], body: String = "") -> ResponseParser {
        var answer = ResponseParser()
        for line in lines { answer.take(line: Array((line + "\r\n").utf8).span) }
        _ = answer.take(piece: Array(body.utf8).span)
        return answer
    }

    @Test func `status, identifiers and body are taken`() {
        let found = answer(["HTTP/2 410 ", "apns-id: abc", "APNS-Unique-ID:  d e ", "date: x", ""], body: "{}")
        #expect(found.isHTTP2)
        #expect(found.answer == PushResponse(status: 410, body: "{}", apnsID: "abc", uniqueID: "d e"))
    }

    @Test func `an interim answer is none, nor are its headers`() {
        #expect(answer(["HTTP/2 103 ", "apns-id: early", ""]).answer == nil)
        let found = answer(["HTTP/2 103 ", "apns-id: early", "", "HTTP/2 200 ", ""])
        #expect(found.answer == PushResponse(status: 200))
    }

    @Test(arguments: ["HTTP/1.1 200 OK", "HTTP/1.0 200", "HTTP/22 200"])
    func `other versions are told from HTTP 2`(_ line: String) {
        #expect(!answer([line]).isHTTP2)
    }

    @Test(arguments: ["", "HTTP/", "HTTP/2", "HTTP/2 ", "HTTP/2 x", "HTTP/2 -5", "\u{0}\u{1}", "apns-id", "apns-id:"])
    func `a line of nonsense is no status`(_ line: String) {
        #expect(answer([line]).answer == nil)
    }

    @Test func `an identifier is cut to 100 bytes of printable ASCII`() {
        let found = answer(["HTTP/2 200", "apns-id: é\u{7}x" + String(repeating: "y", count: 200)])
        #expect(found.answer?.apnsID == "x" + String(repeating: "y", count: 99))
    }

    @Test func `of a long body the first 4 KiB are kept, and after a mebibyte it has been enough`() {
        var answer = ResponseParser()
        let piece = [UInt8](repeating: 0xff, count: 1 << 20)
        #expect(answer.take(piece: piece.span) == true)
        #expect(answer.take(piece: [0].span) == false)
        #expect(answer.body.count == 4096)
    }

    @Test func `what is no UTF-8 is replaced`() {
        var answer = answer(["HTTP/2 400 "])
        #expect(answer.take(piece: [0x41, 0xff].span) == true)
        #expect(answer.answer?.body == "A\u{fffd}")
    }

    @Test(arguments: [
        (410, "", true), (410, #"{"reason":"Unreg"#, true), (410, "{\"reason\":\"Unregistered\"}\n", false),
        (400, #"{"reason"#, true), (400, "", false), (404, "<html>", false), (200, "", false), (200, "{", false),
    ])
    func `a body without its end is noticed`(_ status: Int, _ body: String, _ isTorn: Bool) {
        #expect(answer(["HTTP/2 \(status) "], body: body).isTorn == isTorn)
    }
}
