/// The `apns-push-type` header: the kind of notification.
///
/// Source: Apple, "Sending notification requests to APNs".
public enum PushType: String, Hashable, Sendable, CaseIterable {
    case alert, background, voip, complication, fileprovider, mdm, liveactivity, location, pushtotalk, widgets, controls

    /// The push type whose suffix a topic has; nil for a plain topic.
    public init?(ofTopic topic: String) {
        guard let known = Self.suffixes.first(where: { topic.hasSuffix($0.suffix) }) else { return nil }
        self = known.type
    }

    private static let suffixes: [(suffix: String, type: PushType)] = [
        (".voip", .voip), (".complication", .complication), (".pushkit.fileprovider", .fileprovider),
        (".push-type.liveactivity", .liveactivity), (".push-type.widgets", .widgets),
        (".push-type.controls", .controls), (".location-query", .location), (".voip-ptt", .pushtotalk),
    ]

    /// The largest payload in bytes: 5120 for VoIP, 4096 for all others.
    public var maximumPayload: Int { self == .voip ? 5120 : 4096 }

    /// After how many seconds a request expires that names no expiration; nil leaves it to APNs. A call or a word over push-to-talk is worth nothing later.
    public var lifetime: Int64? {
        switch self {
        case .voip, .pushtotalk, .location: 30
        default: nil
        }
    }
}

/// One notification for one device: everything that a request to APNs carries.
public struct PushRequest: Hashable, Sendable {
    /// The environment selects the server, the topic is the `apns-topic` header, and the token is in the path.
    public var address: TokenAddress
    /// The body: JSON, as it goes over the wire.
    public var payload: [UInt8]
    public var pushType: PushType
    /// `apns-priority`: 10 delivers at once, 5 saves the device's power, 1 never wakes the device. Nil means 10, APNs' default.
    public var priority: Int?
    /// `apns-expiration`, in seconds since the Unix epoch: APNs retries until then. 0 allows one try. Nil leaves it to APNs.
    public var expiration: Int64?
    /// `apns-collapse-id`, 1 to 64 bytes: the device shows only the latest notification with the same one.
    public var collapseID: String?
    /// `apns-id`: a UUID in lower case. It stays the same when the request is sent again.
    public var id: String
    /// Whether the client may repeat the request at once when no response comes. False for a request that was tried before.
    public var mayBeRepeated: Bool
    /// What the sender calls the request while a client has it: see `PushClient.withdraw` and `SendObserver`. Not sent.
    public var slot: Int

    public init(
        address: TokenAddress, payload: [UInt8], pushType: PushType, priority: Int? = nil, expiration: Int64? = nil,
        collapseID: String? = nil, id: String, mayBeRepeated: Bool = true, slot: Int = 0
    ) {
        self.address = address
        self.payload = payload
        self.pushType = pushType
        self.priority = priority
        self.expiration = expiration
        self.collapseID = collapseID
        self.id = id
        self.mayBeRepeated = mayBeRepeated
        self.slot = slot
    }
}

extension PushRequest {
    /// The longest collapse identifier, in bytes.
    public static let maximumCollapseID = 64

    /// Why APNs would refuse the request, or why headers cannot carry it: what was found and what was expected. Nil for a valid
    /// request.
    ///
    /// Source of the limits: Apple, "Sending notification requests to APNs".
    public var fault: String? {
        if payload.isEmpty { return "the payload is empty, expected JSON" }
        if payload.count > pushType.maximumPayload {
            return "the payload is \(payload.count) bytes long, expected at most \(pushType.maximumPayload)"
        }
        // A line end in a name would begin another header.
        if !Self.isVisible(address.topic.name) { return "the topic has characters that no header can carry" }
        if let collapseID {
            guard 1...Self.maximumCollapseID ~= collapseID.utf8.count else {
                return "the collapse id is \(collapseID.utf8.count) bytes long, expected 1 to \(Self.maximumCollapseID)"
            }
            if !Self.isVisible(collapseID) { return "the collapse id has characters that no header can carry" }
        }
        if let priority, ![10, 5, 1].contains(priority) { return "priority is \(priority), expected 10, 5 or 1" }
        if pushType == .background, priority != 5 {
            return "priority of a background push is \(priority.map(String.init) ?? "10, the default"), expected 5"
        }
        if let expiration, expiration < 0 { return "expiration is \(expiration), expected seconds since 1970, or 0" }
        if !Self.isIdentifier(id) { return "apns-id is not a UUID in lower case" }
        return nil
    }

    /// Whether its `expiration` has passed. It never passes without one, or if that allows only one try.
    public func hasExpired(at now: Instant) -> Bool {
        guard let expiration, expiration > 0 else { return false }
        return now.microseconds / 1_000_000 >= expiration
    }

    /// Printable ASCII, without a blank at either end: what a header carries unchanged.
    private static func isVisible(_ text: String) -> Bool {
        text.utf8.allSatisfy { 0x20...0x7e ~= $0 } && text.utf8.first != 0x20 && text.utf8.last != 0x20
    }

    private static func isIdentifier(_ text: String) -> Bool {
        let text = text.utf8.span
        guard text.count == 36 else { return false }
        for place in 0..<36 {
            switch (place, text[place]) {
            case (8, UInt8(ascii: "-")), (13, UInt8(ascii: "-")), (18, UInt8(ascii: "-")), (23, UInt8(ascii: "-")):
                continue
            case (8, _), (13, _), (18, _), (23, _): return false
            case (_, UInt8(ascii: "0")...UInt8(ascii: "9")), (_, UInt8(ascii: "a")...UInt8(ascii: "f")): continue
            default: return false
            }
        }
        return true
    }
}
