internal import TokenModel

/// The header fields of one request, with the values as bytes in one buffer.
///
/// Reused for all requests: once it has grown to the longest request, it allocates no memory. The request must have no `fault`, so
/// that no value contains a line end. Apple says what belongs into the compression table: "Sending notification requests to
/// APNs", "HPACK".
struct RequestHeaders {
    enum Name: String, CaseIterable {
        case method = ":method"
        case scheme = ":scheme"
        case authority = ":authority"
        case path = ":path"
        case authorization
        case topic = "apns-topic"
        case pushType = "apns-push-type"
        case id = "apns-id"
        case priority = "apns-priority"
        case expiration = "apns-expiration"
        case collapseID = "apns-collapse-id"
        case contentLength = "content-length"
    }

    struct Field: Equatable {
        var name: Name
        /// Where the value is in `bytes`.
        var value: Range<Int>
        /// Whether the compressor may add the field to its table.
        var isIndexed: Bool
    }

    /// Fields whose values rarely repeat: a connection indexes them once, so that the table has their names, and sends them as literals
    /// afterwards. The set has those that were indexed.
    struct Indexed: OptionSet {
        var rawValue: UInt8
        static let id = Indexed(rawValue: 1)
        static let expiration = Indexed(rawValue: 2)
        static let collapseID = Indexed(rawValue: 4)
    }

    private(set) var bytes: [UInt8] = []
    private(set) var fields: [Field] = []

    /// - Parameters:
    ///   - authority: See `authority(of:)`.
    ///   - indexed: Belongs to the connection.
    mutating func write(
        _ request: PushRequest, authority: [UInt8], authorization: String?, indexed: inout Indexed
    ) {
        bytes.removeAll(keepingCapacity: true)
        fields.removeAll(keepingCapacity: true)
        add(.method, "POST")
        add(.scheme, "https")
        add(.authority) { $0 += authority }
        add(.path, isIndexed: false) { bytes in
            bytes += "/3/device/".utf8
            for byte in request.address.token.bytes {
                bytes.append(Self.digit(byte >> 4))
                bytes.append(Self.digit(byte & 15))
            }
        }
        if let authorization {
            add(.authorization, isIndexed: false) { bytes in
                bytes += "bearer ".utf8
                bytes += authorization.utf8
            }
        }
        add(.topic, request.address.topic.name)
        add(.pushType, request.pushType.rawValue)
        add(.id, request.id, isIndexed: indexed.insert(.id).inserted)
        if let priority = request.priority { add(.priority, String(priority)) }
        if let expiration = request.expiration {
            add(.expiration, String(expiration), isIndexed: indexed.insert(.expiration).inserted)
        }
        if let collapseID = request.collapseID {
            add(.collapseID, collapseID, isIndexed: indexed.insert(.collapseID).inserted)
        }
        add(.contentLength, String(request.payload.count), isIndexed: false)
    }

    /// A server's `:authority`. RFC 9113, 8.3.1: without the port if it is the scheme's own.
    static func authority(of server: PushServer) -> [UInt8] {
        Array((server.port == 443 ? server.hostInURL : "\(server.hostInURL):\(server.port)").utf8)
    }

    /// The most fields that `write` produces.
    static let mostFields = Name.allCases.count

    private mutating func add(_ name: Name, _ value: String, isIndexed: Bool = true) {
        add(name, isIndexed: isIndexed) { $0 += value.utf8 }
    }

    private mutating func add(_ name: Name, isIndexed: Bool = true, _ write: (inout [UInt8]) -> Void) {
        let start = bytes.count
        write(&bytes)
        fields.append(Field(name: name, value: start..<bytes.count, isIndexed: isIndexed))
    }

    private static func digit(_ value: UInt8) -> UInt8 {
        value < 10 ? UInt8(ascii: "0") + value : UInt8(ascii: "a") + value - 10
    }
}
