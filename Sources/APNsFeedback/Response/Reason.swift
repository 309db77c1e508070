/// What each reason of APNs is about. The one table of them.
///
/// The reason decides, whatever the status: APNs has sent some under others than it documents, and adds reasons without notice
/// (apns2#220 has 400 ExpiredToken). Only for a reason that this version does not know, the status does.
///
/// Source: Apple, "Handling notification responses from APNs".
enum Reason: Equatable {
    /// The device token.
    case token
    /// The device token gets too many requests.
    case tooManyOfToken
    /// This message.
    case message
    /// The topic.
    case topic
    /// What the credential may do with the topic.
    case permission
    /// The credential, which APNs has not accepted.
    case credential
    /// What this program sends with each request.
    case sender
    /// The connection was idle for too long.
    case idle
    /// The server.
    case server

    static let table: [String: Reason] = [
        "BadDeviceToken": .token, "DeviceTokenNotForTopic": .token, "ExpiredToken": .token, "Unregistered": .token,
        "TooManyRequests": .tooManyOfToken,
        "BadCollapseId": .message, "BadExpirationDate": .message, "BadMessageId": .message, "BadPriority": .message,
        "InvalidPushType": .message, "PayloadEmpty": .message, "PayloadTooLarge": .message,
        "BadTopic": .topic, "MissingTopic": .topic, "TopicDisallowed": .topic,
        "Forbidden": .permission,
        "BadCertificate": .credential, "BadCertificateEnvironment": .credential,
        "BadEnvironmentKeyIdInToken": .credential, "BadEnvironmentKeyInToken": .credential,
        "ExpiredProviderToken": .credential, "InvalidProviderToken": .credential, "MissingProviderToken": .credential,
        "TooManyProviderTokenUpdates": .credential, "UnrelatedKeyIdInToken": .credential,
        "BadPath": .sender, "DuplicateHeaders": .sender, "MethodNotAllowed": .sender, "MissingDeviceToken": .sender,
        "IdleTimeout": .idle,
        "InternalServerError": .server, "ServiceUnavailable": .server, "Shutdown": .server,
    ]

    /// - Parameters:
    ///   - status: Of an error.
    ///   - reason: As Apple spells it; nil if there is none.
    init(status: Int32, _ reason: String?) {
        // An error of the server says nothing about a token.
        if let known = reason.flatMap({ Self.table[$0] }), known != .token || status < 500 {
            self = known
            return
        }
        switch status {
        case 410: self = .token
        case 429: self = .tooManyOfToken
        case 500...599: self = .server
        case 403, 404, 405: self = .sender
        default: self = .message
        }
    }
}
