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

    /// The greater of two observations: by instant, then by reason, so that the ledger does not depend on the order of arrival.
    ///
    /// Reasons compare byte by byte, as the column does.
    static func greater(_ left: Observation?, _ right: Observation) -> Observation {
        guard let left else { return right }
        if left.at != right.at { return left.at > right.at ? left : right }
        return right.reason.utf8.lexicographicallyPrecedes(left.reason.utf8) ? left : right
    }
}
