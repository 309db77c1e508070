internal import APNsFeedback
internal import TokenLedger

extension Intake {
    /// One that drains as it is configured.
    ///
    /// - Parameter pair: What it has in common with the other drain of this process.
    init(_ configuration: Configuration, isSecond: Bool = false, pair: DrainPair) {
        self.init(
            lockTimeout: configuration.lockTimeout, guardLimits: configuration.guardLimits,
            truncates: configuration.queueTruncate, isSecond: isSecond, pair: pair,
            interpret: Interpretation.verdict(on:))
    }

    /// Takes up what a reload may have changed.
    mutating func follow(_ configuration: Configuration) {
        lockTimeout = configuration.lockTimeout
        guardLimits = configuration.guardLimits
        truncates = configuration.queueTruncate
    }
}
