internal import TokenModel

/// A request's URL and headers as bytes: one line after the other, each terminated by a NUL for C.
///
/// Reused for all requests: it allocates nothing once it has grown to the longest. The request must have no `fault`: that keeps line
/// ends out of the headers.
struct RequestText {
    private(set) var bytes: [UInt8] = []
    /// Where each line begins. The first line is the URL; the others are headers.
    private(set) var starts: [Int] = []

    /// - Parameter devices: The URL up to the token: see `devices(at:)`.
    mutating func write(_ request: PushRequest, devices: [UInt8], authorization: String?) {
        bytes.removeAll(keepingCapacity: true)
        starts.removeAll(keepingCapacity: true)
        begin()
        bytes.append(contentsOf: devices)
        for byte in request.address.token.bytes {
            bytes.append(Self.digit(byte >> 4))
            bytes.append(Self.digit(byte & 15))
        }
        end()
        header("apns-topic: ", request.address.topic.name)
        header("apns-push-type: ", request.pushType.rawValue)
        header("apns-id: ", request.id)
        if let priority = request.priority { header("apns-priority: ", String(priority)) }
        if let expiration = request.expiration { header("apns-expiration: ", String(expiration)) }
        if let collapseID = request.collapseID { header("apns-collapse-id: ", collapseID) }
        if let authorization { header("authorization: bearer ", authorization) }
        // Otherwise libcurl adds a form's content type, and `accept: */*`.
        header("content-type:", "")
        header("accept:", "")
    }

    /// The common part of a server's URLs. Source: Apple, "Sending notification requests to APNs".
    static func devices(at server: PushServer) -> [UInt8] {
        let host = server.host.contains(":") ? "[\(server.host)]" : server.host
        return Array("https://\(host):\(server.port)/3/device/".utf8)
    }

    /// The most headers that `write` produces.
    static let mostHeaders = 9

    private mutating func header(_ name: String, _ value: String) {
        begin()
        bytes.append(contentsOf: name.utf8)
        bytes.append(contentsOf: value.utf8)
        end()
    }

    private mutating func begin() { starts.append(bytes.count) }
    private mutating func end() { bytes.append(0) }

    private static func digit(_ value: UInt8) -> UInt8 {
        value < 10 ? UInt8(ascii: "0") + value : UInt8(ascii: "a") + value - 10
    }
}
