import NIOCore

/// The checks of a single request, except those of the sender: pure functions of headers and body.
///
/// Source: Apple, "Sending notification requests to APNs". Apple does not document the order of its checks. Here it is the path, the
/// sender (`Authentication`), the token, the topic and the message, so that a stranger learns nothing about tokens.
struct Validation {
    /// The allowed topics; all if empty.
    let topics: Set<String>
    /// The tokens that exist. Nil if all well-formed ones do.
    let knownTokens: Set<String>?

    private static let prefix = "/3/device"
    private static let pushTypes: Set<String> = [
        "alert", "background", "voip", "complication", "fileprovider", "mdm", "liveactivity", "location", "pushtotalk",
        "widgets", "controls",
    ]

    /// The token in the path as the client wrote it, or why there is none.
    static func path(_ headers: RequestHeaders) -> Result<String, Refusal> {
        guard headers.method == "POST" else { return .failure(.methodNotAllowed) }
        guard let path = headers.path, path.hasPrefix(prefix) else { return .failure(.badPath) }
        let rest = path.utf8.dropFirst(prefix.utf8.count)
        guard let slash = rest.first else { return .failure(.missingDeviceToken) }
        guard slash == UInt8(ascii: "/") else { return .failure(.badPath) }
        let token = rest.dropFirst()
        if token.isEmpty { return .failure(.missingDeviceToken) }
        if token.contains(UInt8(ascii: "/")) { return .failure(.badPath) }
        return .success(String(Substring(token)))
    }

    /// - Parameter certificateTopics: The topics of the client's certificate; empty if it names none.
    func message(
        _ headers: RequestHeaders, token: String, body: ByteBuffer, length: Int, certificateTopics: Set<String>
    )
        -> Refusal?
    {
        if headers.hasDuplicates { return .duplicateHeaders }
        if let id = headers.apnsID, !Self.isIdentifier(id) { return .badMessageID }
        if token.utf8.count % 2 != 0 || !token.utf8.allSatisfy(Hex.isDigit) { return .badDeviceToken }
        if let knownTokens, !knownTokens.contains(token.lowercased()) { return .badDeviceToken }
        return topic(headers, certificateTopics) ?? fields(headers) ?? payload(headers, body, length)
    }

    private func topic(_ headers: RequestHeaders, _ certificateTopics: Set<String>) -> Refusal? {
        guard let topic = headers.topic, !topic.isEmpty else {
            // A certificate names its topic, so the header may be missing.
            return headers.topic == nil && !certificateTopics.isEmpty ? nil : .missingTopic
        }
        let isName = topic.utf8.allSatisfy { byte in
            switch byte {
            case UInt8(ascii: "a")...UInt8(ascii: "z"), UInt8(ascii: "A")...UInt8(ascii: "Z"),
                UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "."), UInt8(ascii: "-"), UInt8(ascii: "_"):
                true
            default: false
            }
        }
        if !isName { return .badTopic }
        if !topics.isEmpty, !topics.contains(topic) { return .topicDisallowed }
        if !certificateTopics.isEmpty, !certificateTopics.contains(where: { topic == $0 || topic.hasPrefix($0 + ".") })
        {
            return .topicDisallowed
        }
        return nil
    }

    private func fields(_ headers: RequestHeaders) -> Refusal? {
        if let type = headers.pushType, type != "alert", !Self.pushTypes.contains(type) { return .invalidPushType }
        switch headers.priority {
        case nil, "10": if headers.pushType == "background" { return .badPriority }
        case "5": break
        case "1": if headers.pushType == "background" { return .badPriority }
        default: return .badPriority
        }
        if let expiration = headers.expiration {
            guard let seconds = Int64(expiration), seconds >= 0 else { return .badExpirationDate }
        }
        if let collapse = headers.collapseID, collapse.utf8.count > 64 { return .badCollapseID }
        return nil
    }

    private func payload(_ headers: RequestHeaders, _ body: ByteBuffer, _ length: Int) -> Refusal? {
        if length == 0 { return .payloadEmpty }
        if length > (headers.pushType == "voip" ? 5120 : 4096) { return .payloadTooLarge }
        return body.withUnsafeReadableBytes { bytes in
            // Apple lists no reason for a payload that is not JSON. Providers report PayloadEmpty.
            guard let scan = PayloadScan(bytes) else { return .payloadEmpty }
            // Nor for a background push with something to show. APNs may accept it and never deliver it. Here the push type is
            // refused, so that the mistake shows.
            if headers.pushType == "background", !scan.isContentAvailable || scan.isVisible { return .invalidPushType }
            return nil
        }
    }

    /// A UUID in lower case, 8-4-4-4-12.
    static func isIdentifier(_ text: String) -> Bool {
        guard text.utf8.count == 36 else { return false }
        var position = 0
        for byte in text.utf8 {
            switch position {
            case 8, 13, 18, 23: if byte != UInt8(ascii: "-") { return false }
            default:
                let isUpper = UInt8(ascii: "A")...UInt8(ascii: "F") ~= byte
                if isUpper || !Hex.isDigit(byte) { return false }
            }
            position += 1
        }
        return true
    }
}
