internal import APNsFeedback
internal import TokenLedger

extension Drain {
    /// A drain with the configured settings.
    ///
    /// - Parameters:
    ///   - pair: What the two drains of this process share.
    ///   - summary: Notes reasons of 410s that Apple has not documented.
    init(_ configuration: Configuration, role: Drain.Role = .primary, pair: DrainPair, summary: DrainSummary) {
        self.init(
            lockTimeout: configuration.lockTimeout, guardLimits: configuration.guardLimits,
            truncates: configuration.queueTruncate, rejectedPerHour: configuration.rejectedPerHour, role: role,
            pair: pair,
            interpret: { result in
                let verdict = Interpretation.verdict(on: result)
                if let reason = Interpretation.undocumentedReason(of: verdict) { summary.note(undocumented: reason) }
                return verdict
            })
    }

    /// Applies settings that a reload may have changed.
    mutating func follow(_ configuration: Configuration) {
        lockTimeout = configuration.lockTimeout
        guardLimits = configuration.guardLimits
        truncates = configuration.queueTruncate
        rejectedPerHour = configuration.rejectedPerHour
    }
}
