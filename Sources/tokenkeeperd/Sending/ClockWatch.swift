internal import APNsFeedback
internal import TokenModel

/// Compares this machine's clock with the `date` header of APNs' responses. Provider tokens contain the time, so APNs refuses them if the clock is
/// wrong. Pure.
struct ClockWatch {
    /// How many seconds this clock is ahead, by the last response that was looked at.
    private var ahead: Int64 = 0
    /// How many responses in a row say that it is wrong.
    private var wrong = 0
    private var notedAt: ContinuousClock.Instant?

    /// In seconds: more is wrong, and at most half of it is right. A provider token may be an hour old.
    private static let tolerance: Int64 = 60
    /// One response proves nothing.
    private static let enough = 3
    private static let every: Duration = .seconds(1)

    mutating func note(_ outcomes: [PushOutcome], at now: ContinuousClock.Instant) {
        if let notedAt, notedAt.duration(to: now) < Self.every { return }
        for outcome in outcomes where outcome.sends == 1 {
            guard case .answered(let answer) = outcome.end, Interpretation.isOfAPNs(answer),
                let theirs = answer.answeredAt, let sentAt = outcome.sentAt, let time = outcome.responseTime
            else { continue }
            notedAt = now
            ahead = (sentAt.microseconds - theirs.microseconds + time.microseconds) / 1_000_000
            if abs(ahead) > Self.tolerance { wrong += 1 } else if abs(ahead) <= Self.tolerance / 2 { wrong = 0 }
            return
        }
    }

    /// Nil if the clock is right, or if that is not known.
    var problem: WaitingProblem? {
        guard wrong >= Self.enough else { return nil }
        let amount = DurationText.text(.seconds((abs(ahead) + 30) / 60 * 60))
        return WaitingProblem(
            "the clock of this machine is ", "\(amount) \(ahead > 0 ? "ahead of" : "behind")",
            " APNs': set it, and keep it right with NTP")
    }
}
