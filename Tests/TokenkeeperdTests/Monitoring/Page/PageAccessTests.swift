import Testing

@testable import tokenkeeperd

@Suite struct `Who may see the status page` {
    @Test(arguments: [
        "localhost", "localhost:9188", "LOCALHOST", "127.0.0.1", "127.0.0.1:9188", "[::1]", "[::1]:9188", "10.0.0.7:1",
    ])
    func `a client on this machine that uses an address`(host: String) {
        #expect(PageAccess.loopback.admits(isLocal: true, host: host))
        #expect(!PageAccess.loopback.admits(isLocal: false, host: host))
        #expect(!PageAccess.off.admits(isLocal: true, host: host))
    }

    @Test(arguments: [
        nil, "", "evil.example", "evil.example:9188", "127.0.0.1.evil.example", "localhost.evil.example",
        "127.0.0.1@evil.example",
        "[::1].evil.example", "[evil]", "1.2.3", "1.2.3.256", "127.0.0.1:9188:1", "127.0.0.1:x", "[::1",
    ])
    func `not one that uses a name, because a stranger may control the name`(host: String?) {
        #expect(!PageAccess.loopback.admits(isLocal: true, host: host))
        #expect(PageAccess.network.admits(isLocal: false, host: host))
    }
}
