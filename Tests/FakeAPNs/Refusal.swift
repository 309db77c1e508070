/// An error that the server finds in a request. The names are Apple's.
///
/// Source: Apple, "Handling notification responses from APNs".
struct Refusal: Error, Hashable {
    let status: Int
    let reason: String

    static let badCollapseID = Refusal(status: 400, reason: "BadCollapseId")
    static let badDeviceToken = Refusal(status: 400, reason: "BadDeviceToken")
    static let badExpirationDate = Refusal(status: 400, reason: "BadExpirationDate")
    static let badMessageID = Refusal(status: 400, reason: "BadMessageId")
    static let badPriority = Refusal(status: 400, reason: "BadPriority")
    static let badTopic = Refusal(status: 400, reason: "BadTopic")
    static let duplicateHeaders = Refusal(status: 400, reason: "DuplicateHeaders")
    static let invalidPushType = Refusal(status: 400, reason: "InvalidPushType")
    static let missingDeviceToken = Refusal(status: 400, reason: "MissingDeviceToken")
    static let missingTopic = Refusal(status: 400, reason: "MissingTopic")
    static let payloadEmpty = Refusal(status: 400, reason: "PayloadEmpty")
    static let topicDisallowed = Refusal(status: 400, reason: "TopicDisallowed")
    static let badCertificate = Refusal(status: 403, reason: "BadCertificate")
    static let expiredProviderToken = Refusal(status: 403, reason: "ExpiredProviderToken")
    static let invalidProviderToken = Refusal(status: 403, reason: "InvalidProviderToken")
    static let missingProviderToken = Refusal(status: 403, reason: "MissingProviderToken")
    static let badPath = Refusal(status: 404, reason: "BadPath")
    static let methodNotAllowed = Refusal(status: 405, reason: "MethodNotAllowed")
    static let payloadTooLarge = Refusal(status: 413, reason: "PayloadTooLarge")
    static let tooManyProviderTokenUpdates = Refusal(status: 429, reason: "TooManyProviderTokenUpdates")
}
