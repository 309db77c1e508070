internal import APNsFeedback
internal import TokenLedger

extension Drain {
    /// One that drains as it is configured.
    ///
    /// - Parameters:
    ///   - pair: What it has in common with the other drain of this process.
    ///   - summary: Told of a 410's reason that Apple has not documented.
    init(_ configuration: Configuration, isSecond: Bool = false, pair: DrainPair, summary: DrainSummary) {
        self.init(
            lockTimeout: configuration.lockTimeout, guardLimits: configuration.guardLimits,
            truncates: configuration.queueTruncate, rejectedPerHour: configuration.rejectedPerHour, isSecond: isSecond,
            pair: pair,
            interpret: { result in
                let verdict = Interpretation.verdict(on: result)
                if let reason = Interpretation.undocumentedReason(of: verdict) { summary.note(undocumented: reason) }
                return verdict
            })
    }

    /// Takes up what a reload may have changed.
    mutating func follow(_ configuration: Configuration) {
        lockTimeout = configuration.lockTimeout
        guardLimits = configuration.guardLimits
        truncates = configuration.queueTruncate
        rejectedPerHour = configuration.rejectedPerHour
    }
}
