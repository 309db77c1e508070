import Testing

@testable import APNsFeedback

@Suite struct ConnectionTableTests {
    private let server = PushServer(host: "h.example")
    private let name = ConnectionTable.Name(localPort: 4000, peerPort: 443, peer: 1)
    private let now = ContinuousClock.now

    private func table() -> ConnectionTable {
        var table = ConnectionTable()
        table.open(name, ConnectionTable.Connection(server: server, socket: 9, heard: now))
        table.join(name)
        return table
    }

    @Test func `a connection takes a second request after its first answer`() {
        var table = table()
        #expect(table.place(on: name) == .unproven)
        #expect(table.answering(server) == 0)
        #expect(table.heard(name, at: now) == true)
        #expect(table.heard(name, at: now) == false)
        #expect(table.place(on: name) == .free)
        #expect(table.answering(server) == 1)
        #expect(table.answering(PushServer(host: "other.example")) == 0)
    }

    @Test func `a connection whose only request has left takes another`() {
        var table = table()
        #expect(table.leave(name) == nil)
        #expect(table.place(on: name) == .free)
    }

    @Test func `an unfit connection is to be closed when the last request leaves it`() {
        var table = table()
        _ = table.heard(name, at: now)
        table.join(name)
        table.isUnfit(name)
        #expect(table.place(on: name) == .unfit)
        #expect(table.leave(name) == nil)
        #expect(table.isDraining(server))
        #expect(table.leave(name) == 9)
        #expect(!table.isDraining(server))
    }

    @Test func `a closed connection is forgotten, and its name is free`() {
        var table = table()
        #expect(table.closed(socket: 8) == nil)
        #expect(table.closed(socket: 9)?.hasAnswered == false)
        #expect(table.place(on: name) == .new)
        #expect(table.leave(name) == nil)
        #expect(table.opened == 1)
    }
}
