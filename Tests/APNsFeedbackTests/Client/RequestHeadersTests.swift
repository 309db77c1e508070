import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct RequestHeadersTests {
    private func lines(_ request: PushRequest, authorization: String? = nil) -> [String] {
        var headers = RequestHeaders()
        var indexed: RequestHeaders.Indexed = []
        // Twice: what was there before must not show.
        headers.write(
            APNsFeedbackTests.request(token: String(repeating: "ff", count: 512)), authority: [0x78],
            authorization: "x", indexed: &indexed)
        headers.write(request, authority: Array("h.example".utf8), authorization: authorization, indexed: &indexed)
        return headers.fields.map { field in
            "\(field.name.rawValue): \(String(decoding: headers.bytes[field.value], as: UTF8.self))"
        }
    }

    @Test func `only headers that are set are sent, and the path has the token in lower case`() {
        #expect(
            lines(request(token: "00AbFf")) == [
                ":method: POST", ":scheme: https", ":authority: h.example", ":path: /3/device/00abff",
                "apns-topic: com.example.app", "apns-push-type: alert", "apns-id: 00000000-0000-4000-8000-000000000001",
                "content-length: 2",
            ])
    }

    @Test func `all headers that can be set are sent`() {
        var request = request(collapseID: "c d")
        request.priority = 5
        request.expiration = 0
        let lines = lines(request, authorization: "a.b.c")
        for line in [
            "apns-priority: 5", "apns-expiration: 0", "apns-collapse-id: c d", "authorization: bearer a.b.c",
        ] {
            #expect(lines.contains(line))
        }
        #expect(lines.count == RequestHeaders.mostFields)
    }

    @Test func `secrets and paths are never indexed, and headers that rarely repeat are indexed once`() {
        var headers = RequestHeaders()
        var indexed: RequestHeaders.Indexed = []
        func isIndexed(_ request: PushRequest) -> [RequestHeaders.Name] {
            headers.write(request, authority: [0x78], authorization: "a", indexed: &indexed)
            return headers.fields.filter(\.isIndexed).map(\.name)
        }
        let always: [RequestHeaders.Name] = [.method, .scheme, .authority, .topic, .pushType]
        #expect(isIndexed(request(1)) == always + [.id])
        var second = request(2, collapseID: "c")
        second.expiration = 1
        #expect(isIndexed(second) == always + [.expiration, .collapseID])
        #expect(isIndexed(second) == always)
    }

    @Test(arguments: [("h.example", 443, "h.example"), ("h.example", 2197, "h.example:2197"), ("::1", 443, "[::1]")])
    func `the authority is the host, with brackets and a port where needed`(
        _ host: String, _ port: Int, _ expected: String
    ) {
        let authority = RequestHeaders.authority(of: PushServer(host: host, port: port))
        #expect(String(decoding: authority, as: UTF8.self) == expected)
    }

    @Test(arguments: [
        ("h2h3 [:path: /3/device/0123456789abcdef]", "h2h3 [:path: /3/device/01234567…]"),
        ("POST /3/device/0123 then /3/device/99887766554433", "POST /3/device/0123… then /3/device/99887766…"),
        ("Connected to h", "Connected to h"),
    ])
    func `a trace shows 8 digits of a token`(_ line: String, _ shown: String) {
        #expect(TraceSink.presentable(line) == shown)
    }

    @Test func `a trace does not show the provider token`() {
        #expect(TraceSink.presentable("h2h3 [authorization: bearer eyJ]") == nil)
        #expect(TraceSink.presentable("Bearer eyJ") == nil)
    }

    @Test func `a trace does not show the password of a proxy`() {
        #expect(TraceSink.presentable("Uses proxy env variable https_proxy == 'http://u:p@h:1'") == nil)
        #expect(TraceSink.presentable("Unsupported proxy syntax in 'http://u:p@h h'") == nil)
        #expect(TraceSink.presentable("Proxy-Authorization: Basic dTpw") == nil)
        #expect(TraceSink.presentable("CONNECT tunnel established, response 200") != nil)
    }
}
