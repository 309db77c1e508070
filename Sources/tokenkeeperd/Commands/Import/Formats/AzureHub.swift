/// What Azure Notification Hubs exports, as rows.
enum AzureHub {
    /// The tags by which the hub remembers the installation and the user that a registration belongs to.
    private static let installation = "$InstallationId:{"
    private static let user = "$UserId:{"

    /// A registration for APNs. The hub does not say when it was made, only when it expires.
    static func registration(_ element: XMLElement, into row: inout ImportRow) -> ImportRecord {
        let type = element.attributes["i:type"] ?? ""
        guard type.hasPrefix("Apple") else {
            return type.hasSuffix("RegistrationDescription")
                ? .skipped("\(String(type.prefix(60))): another platform")
                : .refused(Refusal("the element has no i:type of a registration"))
        }
        row.set(.token, (element.children["DeviceToken"] ?? "").utf8)
        // Without tags, those of another registration of the token stay.
        for tag in (element.children["Tags"] ?? "").split(separator: ",") {
            let tag = tag.drop { $0 == " " }
            if let id = value(of: tag, installation) {
                row.set(.deviceID, id.utf8)
            } else if let id = value(of: tag, user) {
                row.set(.userID, id.utf8)
            } else {
                row.add(tag: tag.utf8)
            }
        }
        return .row
    }

    /// What APNs has said about a token. The hub's own words become Apple's.
    static func feedback(_ element: XMLElement, into row: inout ImportRow) -> ImportRecord {
        let platform = element.children["Platform"] ?? ""
        guard ["apple", "apns"].contains(platform.lowercased()) else {
            return platform.isEmpty
                ? .refused(Refusal("the element has no Platform"))
                : .skipped("\(String(platform.prefix(60))): another platform")
        }
        let error = element.children["NotificationSystemError"] ?? ""
        guard error == "ExpiredChannel" || error == "BadChannel" else {
            return error.isEmpty
                ? .refused(Refusal("the element has no NotificationSystemError"))
                : .skipped("\(String(error.prefix(60))): says nothing about the token")
        }
        row.set(.token, (element.children["PnsHandle"] ?? "").utf8)
        row.set(.registeredAt, (element.children["FeedbackTime"] ?? "").utf8)
        row.set(.kind, (error == "ExpiredChannel" ? "410" : "400").utf8)
        return .row
    }

    private static func value(of tag: Substring, _ prefix: String) -> String? {
        tag.hasPrefix(prefix) && tag.hasSuffix("}") ? String(tag.dropFirst(prefix.count).dropLast()) : nil
    }
}
