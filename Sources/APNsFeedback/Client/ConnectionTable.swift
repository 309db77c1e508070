/// The connections that requests have gone to, as far as libcurl tells of them, and what each has done so far.
struct ConnectionTable {
    /// Both ends of a connection: what libcurl calls it when it is about to use it.
    struct Name: Hashable {
        var localPort: UInt16
        var peerPort: UInt16
        var peer: UInt64
    }

    struct Connection {
        var server: PushServer
        /// For shutting it down.
        var socket: Int32
        /// How many requests are on it.
        var load = 0
        var hasAnswered = false
        /// Whether it is to be closed as soon as it has no requests any more, and to have no more until then.
        var isUnfit = false
        /// When anything was last heard on it; at first, when it was opened.
        var heard: ContinuousClock.Instant
    }

    private(set) var connections: [Name: Connection] = [:]
    /// Ever opened, those included that no request went to.
    private(set) var opened = 0

    enum Place: Equatable {
        /// The request may go to it.
        case free
        /// Not yet: there is one on it, and it has not answered.
        case unproven
        /// It is to have no more of them.
        case unfit
        /// Not known.
        case new
    }

    func place(on name: Name) -> Place {
        guard let connection = connections[name] else { return .new }
        if connection.isUnfit { return .unfit }
        return connection.hasAnswered || connection.load == 0 ? .free : .unproven
    }

    mutating func open(_ name: Name, _ connection: Connection) {
        connections[name] = connection
        opened += 1
    }

    mutating func join(_ name: Name) {
        connections[name]?.load += 1
    }

    /// - Returns: The socket to shut down, when it was the last request of a connection that is unfit.
    mutating func leave(_ name: Name) -> Int32? {
        guard let place = connections.index(forKey: name) else { return nil }
        connections.values[place].load -= 1
        return connections.values[place].isUnfit && connections.values[place].load == 0
            ? connections.values[place].socket : nil
    }

    /// To be told before the request leaves it.
    mutating func isUnfit(_ name: Name) {
        connections[name]?.isUnfit = true
    }

    /// Whether a server has a connection that is to be closed, and has requests still.
    func isDraining(_ server: PushServer) -> Bool {
        connections.values.contains { $0.server == server && $0.isUnfit && $0.load > 0 }
    }

    /// Something came in.
    ///
    /// - Returns: Whether it was this connection's first answer.
    mutating func heard(_ name: Name, at now: ContinuousClock.Instant) -> Bool {
        guard let place = connections.index(forKey: name) else { return false }
        connections.values[place].heard = now
        if connections.values[place].hasAnswered { return false }
        connections.values[place].hasAnswered = true
        return true
    }

    /// - Returns: The connection that had this socket, if a request ever went to it.
    mutating func closed(socket: Int32) -> Connection? {
        guard let name = connections.first(where: { $0.value.socket == socket })?.key else { return nil }
        return connections.removeValue(forKey: name)
    }

    /// How many connections to a server have answered something, and are open.
    func answering(_ server: PushServer) -> Int {
        connections.values.count { $0.server == server && $0.hasAnswered }
    }
}
