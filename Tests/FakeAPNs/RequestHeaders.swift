import NIOHPACK

/// The headers that the server uses, found in one pass.
struct RequestHeaders {
    var method: String?
    var path: String?
    var authorization: String?
    var topic: String?
    var pushType: String?
    var priority: String?
    var expiration: String?
    var collapseID: String?
    var apnsID: String?
    var channelID: String?
    /// Whether one of these headers came twice.
    var hasDuplicates = false

    init(_ headers: HPACKHeaders) {
        var duplicates = false
        func set(_ field: inout String?, _ value: String) {
            if field != nil { duplicates = true }
            field = value
        }
        // Comparing the length first avoids most comparisons of text.
        for (name, value, _) in headers {
            switch name.utf8.count {
            case 5 where name == ":path": path = value
            case 7 where name == ":method": method = value
            case 7 where name == "apns-id": set(&apnsID, value)
            case 10 where name == "apns-topic": set(&topic, value)
            case 13 where name == "authorization": set(&authorization, value)
            case 13 where name == "apns-priority": set(&priority, value)
            case 14 where name == "apns-push-type": set(&pushType, value)
            case 15 where name == "apns-channel-id": set(&channelID, value)
            case 15 where name == "apns-expiration": set(&expiration, value)
            case 16 where name == "apns-collapse-id": set(&collapseID, value)
            default: break
            }
        }
        hasDuplicates = duplicates
    }

}
