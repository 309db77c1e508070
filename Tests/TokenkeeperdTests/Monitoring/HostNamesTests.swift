import Testing

@testable import tokenkeeperd

@Suite struct `The name by which a client asks` {
    private let hosts = HostNames(["Tokens.example.com:9188", "status.example"], machine: "db1.internal")

    @Test(arguments: [
        nil, "localhost", "localhost:9188", "LOCALHOST", "127.0.0.1", "127.0.0.1:9188", "[::1]", "[::1]:9188",
        "10.0.0.7:1",
        "tokenkeeperd:9188", "push_daemon-1", "db1.internal:9188", "DB1.internal", "tokens.example.com:9188",
        "tokens.example.com.:9188", "status.example",
    ])
    func `may be an address, a name that no stranger can control, or one that the settings name`(host: String?) {
        #expect(hosts.admit(host))
    }

    @Test(arguments: [
        "", "evil.example", "evil.example:9188", "127.0.0.1.evil.example", "localhost.evil.example", "evil@localhost",
        "127.0.0.1@evil.example", "[::1].evil.example", "[evil]", "1.2.3", "1.2.3.256", "127.0.0.1:9188:1",
        "127.0.0.1:x", "[::1",
        "a.tokens.example.com", "localhost,evil.example", "db1.internal.evil.example", "localhost ", ".",
    ])
    func `may be no other name, because a stranger may control it`(host: String) {
        #expect(!hosts.admit(host))
    }
}
