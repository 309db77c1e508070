internal import APNsFeedback

/// What the servers hold against the sender, by credential and environment: decides what is logged. Pure.
struct SenderFaults {
    private struct Known {
        var fault: PushFault
        /// The fault that was logged last.
        var logged: PushFault
        var loggedAt: ContinuousClock.Instant
    }

    private var known: [CredentialScope: Known] = [:]

    /// A fault that comes again is logged again after this time.
    private static let every: Duration = .seconds(60)

    /// Takes a client's latest fault, which may be an old one.
    ///
    /// - Returns: Whether to log it.
    mutating func take(_ fault: PushFault, of scope: CredentialScope, at now: ContinuousClock.Instant) -> Bool {
        guard let before = known[scope] else {
            known[scope] = Known(fault: fault, logged: fault, loggedAt: now)
            return true
        }
        known[scope]?.fault = fault
        let hasChanged = fault.goAway != before.logged.goAway
        let hasComeAgain = fault.count > before.logged.count && before.loggedAt.duration(to: now) >= Self.every
        guard hasChanged || hasComeAgain else { return false }
        known[scope] = Known(fault: fault, logged: fault, loggedAt: now)
        return true
    }

    /// One sentence for each credential and environment whose server blames the sender now.
    var problems: [String] {
        known.filter(\.value.fault.isCurrent).sorted { $0.key < $1.key }.map { scope, known in
            "APNs ends connections and blames the sender (\(scope)); check the credential: "
                + (known.fault.goAway.reason ?? known.fault.goAway.message)
        }
    }
}
