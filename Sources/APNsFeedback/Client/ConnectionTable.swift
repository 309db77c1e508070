/// The connections that carried requests, as far as libcurl reveals them, and the state of each.
struct ConnectionTable {
    /// Both ends of a connection: libcurl names them when it is about to use it.
    struct Name: Hashable {
        var localPort: UInt16
        var peerPort: UInt16
        var peer: UInt64
    }

    struct Connection {
        var server: PushServer
        /// To shut the connection down.
        var socket: Int32
        /// The number of requests on it.
        var load = 0
        var hasAnswered = false
        /// Whether it gets no more requests, and is closed after its last one.
        var isUnfit = false
        /// When data last arrived; at first, when it was opened.
        var heard: ContinuousClock.Instant
    }

    private(set) var connections: [Name: Connection] = [:]
    /// The number of connections ever opened.
    private(set) var opened = 0

    enum Place: Equatable {
        /// The request may use it.
        case free
        /// It has a request and has not responded: not yet.
        case unproven
        /// It gets no more requests.
        case unfit
        /// Unknown so far.
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

    /// - Returns: The socket to shut down, if this was the last request of an unfit connection.
    mutating func leave(_ name: Name) -> Int32? {
        guard let place = connections.index(forKey: name) else { return nil }
        connections.values[place].load -= 1
        return connections.values[place].isUnfit && connections.values[place].load == 0
            ? connections.values[place].socket : nil
    }

    /// Call this before the request leaves the connection.
    mutating func isUnfit(_ name: Name) {
        connections[name]?.isUnfit = true
    }

    /// Whether a server has an unfit connection that still has requests.
    func isDraining(_ server: PushServer) -> Bool {
        connections.values.contains { $0.server == server && $0.isUnfit && $0.load > 0 }
    }

    /// Data has arrived.
    ///
    /// - Returns: Whether it is the connection's first.
    mutating func heard(_ name: Name, at now: ContinuousClock.Instant) -> Bool {
        guard let place = connections.index(forKey: name) else { return false }
        connections.values[place].heard = now
        if connections.values[place].hasAnswered { return false }
        connections.values[place].hasAnswered = true
        return true
    }

    /// - Returns: The connection of this socket, if it ever carried a request.
    mutating func closed(socket: Int32) -> Connection? {
        guard let name = connections.first(where: { $0.value.socket == socket })?.key else { return nil }
        return connections.removeValue(forKey: name)
    }

    /// The number of open connections to a server that have responded.
    func answering(_ server: PushServer) -> Int {
        connections.values.count { $0.server == server && $0.hasAnswered }
    }
}
