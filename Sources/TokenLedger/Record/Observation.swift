internal import TokenModel

/// What one result says about its token.
struct Observation {
    /// The result's row in its batch.
    var row: Int
    /// The environment and topic, as an index into `Observations.places`.
    var place: Int
    var token: DeviceToken
    var at: Instant
    var reason: String
    /// Otherwise a 410.
    var isSuspect: Bool
    var queuedAt: Instant
    /// Whether an operator has released it, so that it is not held again.
    var isReleased: Bool
}
