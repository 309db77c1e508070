import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct RequestTextTests {
    private func lines(_ request: PushRequest, authorization: String? = nil) -> [String] {
        var text = RequestText()
        let devices = RequestText.devices(at: PushServer(host: "h.example", port: 2197))
        // Twice: what was there before must not show.
        text.write(
            APNsFeedbackTests.request(token: String(repeating: "ff", count: 512)), devices: devices, authorization: "x")
        text.write(request, devices: devices, authorization: authorization)
        return text.starts.map { start in
            String(decoding: text.bytes[start...].prefix { $0 != 0 }, as: UTF8.self)
        }
    }

    @Test func `the token goes into the path in lower case`() {
        #expect(lines(request(token: "00AbFf"))[0] == "https://h.example:2197/3/device/00abff")
    }

    @Test func `only what is set is sent`() {
        #expect(
            lines(request()).dropFirst() == [
                "apns-topic: com.example.app", "apns-push-type: alert", "apns-id: 00000000-0000-4000-8000-000000000001",
                "content-type:", "accept:",
            ])
    }

    @Test func `all that can be set is sent, and fits`() {
        var request = request(collapseID: "c d")
        request.priority = 5
        request.expiration = 0
        let lines = lines(request, authorization: "a.b.c")
        for line in [
            "apns-priority: 5", "apns-expiration: 0", "apns-collapse-id: c d", "authorization: bearer a.b.c",
        ] {
            #expect(lines.contains(line))
        }
        #expect(lines.count - 1 == RequestText.mostHeaders)
    }

    @Test func `an address of version 6 is put in brackets`() {
        let devices = RequestText.devices(at: PushServer(host: "::1", port: 443))
        #expect(String(decoding: devices, as: UTF8.self) == "https://[::1]:443/3/device/")
    }

    @Test(arguments: [
        ("h2h3 [:path: /3/device/0123456789abcdef]", "h2h3 [:path: /3/device/01234567…]"),
        ("POST /3/device/0123 then /3/device/99887766554433", "POST /3/device/0123… then /3/device/99887766…"),
        ("Connected to h", "Connected to h"),
    ])
    func `a trace shows 8 digits of a token`(_ line: String, _ shown: String) {
        #expect(TraceSink.presentable(line) == shown)
    }

    @Test func `a trace does not show who sends`() {
        #expect(TraceSink.presentable("h2h3 [authorization: bearer eyJ]") == nil)
        #expect(TraceSink.presentable("Bearer eyJ") == nil)
    }
}
