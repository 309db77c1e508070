import Testing

@testable import tokenkeeperd

@Suite struct `The address for scrapes` {
    @Test(arguments: [
        ("127.0.0.1:9188", ListenAddress.tcp(host: "127.0.0.1", port: 9188)),
        ("0.0.0.0:1", .tcp(host: "0.0.0.0", port: 1)),
        ("[::1]:9188", .tcp(host: "::1", port: 9188)),
        ("[::]:65535", .tcp(host: "::", port: 65535)),
        ("unix:/run/tokenkeeperd/metrics.sock", .unix("/run/tokenkeeperd/metrics.sock")),
    ])
    func `an IP address with a port, or a Unix socket`(_ text: String, _ address: ListenAddress) {
        #expect(ListenAddress(text) == address)
    }

    @Test(arguments: [
        "", "9188", ":9188", "localhost:9188", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x", "::1:9188",
        "[127.0.0.1]:9188", "127.0.1:9188", "unix:", "unix:metrics.sock", "unix:/" + String(repeating: "a", count: 107),
        "http://127.0.0.1:9188",
    ])
    func `anything else is refused`(_ text: String) {
        #expect(ListenAddress(text) == nil)
    }
}
