/// A client's work for one environment's server.
final class ServerScope {
    let server: PushServer
    /// See `RequestText`.
    let devices: [UInt8]
    var queue = RequestQueue()
    var admission: Admission
    var backoff = ServerBackoff()
    /// The number of requests that libcurl has.
    var underWay = 0

    init(_ server: PushServer, most: Int) {
        self.server = server
        devices = RequestText.devices(at: server)
        admission = Admission(most: most)
    }
}
