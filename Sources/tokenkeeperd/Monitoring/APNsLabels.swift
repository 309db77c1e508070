internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// The labels for what a response of APNs says. Each has a bounded set of values, whatever a sender or a proxy writes.
enum APNsLabels {
    /// - Parameter environment: Nil if it is unknown.
    static func environment(_ environment: String?) -> String {
        environment.flatMap(Environment.init(rawValue:))?.rawValue ?? TopicLabels.other
    }

    /// A status that APNs uses, or `other`.
    static func status(_ status: Int32?) -> String {
        status.flatMap { Interpretation.statuses.contains($0) ? "\($0)" : nil } ?? TopicLabels.other
    }

    /// A reason that APNs uses, one of our own for what it lacks, or `other`. Empty if there is none, which is the same as no label.
    static func reason(_ reason: String?) -> String {
        guard let reason else { return "" }
        return Interpretation.reasons.contains(reason) || ours.contains(reason) ? reason : TopicLabels.other
    }

    /// What `result_stat` has in place of a reason of APNs.
    private static let ours = Set(
        [Verdict.noReason, Verdict.rejected, Verdict.rejectedNotKept] + Verdict.DoubtfulGone.allCases.map(\.rawValue))
}
