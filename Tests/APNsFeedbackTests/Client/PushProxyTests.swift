import Foundation
import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct `The addresses of servers and proxies` {
    @Test(arguments: [
        ("api.push.apple.com:443", "api.push.apple.com", 443), ("127.0.0.1:2197", "127.0.0.1", 2197),
        ("[::1]:65535", "::1", 65535), ("[2001:DB8::a]:1", "2001:DB8::a", 1),
    ])
    func `a server is a host and a port, with brackets around an IPv6 address`(_ text: String, host: String, port: Int)
    {
        #expect(PushServer(text) == PushServer(host: host, port: port))
        let authority = String(
            decoding: RequestHeaders.authority(of: PushServer(host: host, port: port)), as: UTF8.self)
        #expect(authority == (port == 443 ? host : text))
    }

    @Test func `the authority of an IPv6 address has brackets also without a port`() {
        #expect(RequestHeaders.authority(of: PushServer(host: "::1", port: 443)) == Array("[::1]".utf8))
    }

    @Test(arguments: [
        "", "a", ":443", "a:", "a:0", "a:65536", "a:+1", "a:-1", "a b:1", "::1:443", "[::1]", "[]:1", "[a]:1",
        "[127.0.0.1]:1",
        "[::1:1", "ü:1", "a:１", "a/b:1", "u@a:1",
    ])
    func `nothing else is a server`(_ text: String) {
        #expect(PushServer(text) == nil)
        #expect(PushProxy("http://\(text)") == nil || text == "u@a:1")
    }

    private func url(_ proxy: PushProxy?) throws -> String {
        let url = try #require(try proxy?.url())
        return url.withBytes { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
    }

    @Test(arguments: [
        ("http://h.example:3128", "http://h.example:3128", "http://h.example:3128"),
        ("HTTPS://[::1]:1/", "https://[::1]:1", "https://[::1]:1"),
        ("http://u@h:1", "http://h:1", "http://u:@h:1"),
        ("https://u%40:p%3A:w@h:1", "https://h:1", "https://u%40:p%3A:w@h:1"),
    ])
    func `a proxy is a URL, and is described without its user and password`(_ text: String, name: String, whole: String)
        throws
    {
        let proxy = PushProxy(text)
        #expect(proxy?.description == name)
        #expect(try url(proxy) == whole)
    }

    @Test(arguments: [
        "h:1", "ftp://h:1", "socks5://h:1", "http://h", "http://:p@h:1", "http://u:a/b@h:1", "http://h:1/x",
        "http://u p@h:1",
    ])
    func `nothing else is a proxy`(_ text: String) {
        #expect(PushProxy(text) == nil)
    }

    @Test func `a password from a file is encoded, and read again for each connection`() throws {
        let path = NSTemporaryDirectory() + "password-\(UUID().uuidString)"
        defer { try? FileManager.default.removeItem(atPath: path) }
        var proxy = try #require(PushProxy("https://u@h:1"))
        proxy.passwordFile = path
        do throws(TLSConnection.Failure) {
            _ = try proxy.url()
            Issue.record("the file does not exist")
        } catch {
            #expect(
                error.message == "cannot read the password of the proxy https://h:1: \(path): No such file or directory"
            )
        }
        for (password, encoded) in [("a@ü\n", "%61%40%C3%BC"), ("b\r\nsecond line", "%62"), ("", "")] {
            try password.write(toFile: path, atomically: true, encoding: .utf8)
            #expect(try url(proxy) == "https://u:\(encoded)@h:1")
        }
    }
}
