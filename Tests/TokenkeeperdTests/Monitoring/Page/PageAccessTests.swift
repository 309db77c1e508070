import Testing

@testable import tokenkeeperd

@Suite struct `Who may see the status page` {
    @Test func `a client on this machine, everybody, or nobody`() {
        #expect(PageAccess.loopback.admits(isLocal: true) && !PageAccess.loopback.admits(isLocal: false))
        #expect(PageAccess.network.admits(isLocal: true) && PageAccess.network.admits(isLocal: false))
        #expect(!PageAccess.off.admits(isLocal: true) && !PageAccess.off.admits(isLocal: false))
    }
}
