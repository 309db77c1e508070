internal import CLibPQ

extension Connection {
    /// The server of this connection: its name or address, or the folder of its socket, and its port.
    package var host: String {
        guard let host = unsafe PQhost(handle), let port = unsafe PQport(handle) else { return "" }
        return unsafe "\(String(cString: host)):\(String(cString: port))"
    }

    /// The database and its server, for people: `database push on /run/postgresql:5432`. It has no password.
    package var name: String {
        let database = unsafe PQdb(handle).map { unsafe String(cString: $0) } ?? ""
        return "database \(database) on \(host)"
    }
}
