internal import APNsFeedback
internal import TokenModel

/// Compares this machine's clock with the `date` header of APNs' responses. Provider tokens contain the time, so APNs refuses them if the clock is
/// wrong. Pure.
struct ClockWatch {
    /// How many seconds this clock is ahead, by each of the last responses in a row that say it is wrong.
    private var ahead: [Int64] = []
    private var notedAt: ContinuousClock.Instant?

    /// A header is as old as its response, and a response may take half a minute.
    private static let tolerance: Int64 = 60
    /// One response proves nothing.
    private static let enough = 3
    private static let every: Duration = .seconds(1)

    mutating func note(_ outcomes: [PushOutcome], at now: SendState.Moment) {
        if let notedAt, notedAt.duration(to: now.clock) < Self.every { return }
        for outcome in outcomes {
            guard case .answered(let answer) = outcome.end, Interpretation.isOfAPNs(answer),
                let answeredAt = answer.answeredAt
            else { continue }
            notedAt = now.clock
            let seconds = (now.timeOfDay.microseconds - answeredAt.microseconds) / 1_000_000
            if abs(seconds) < Self.tolerance {
                ahead = []
            } else {
                ahead = ahead.suffix(Self.enough - 1) + [seconds]
            }
            return
        }
    }

    /// One sentence; nil if the clock is right, or if that is not known.
    var problem: String? {
        guard ahead.count == Self.enough, let last = ahead.last, Set(ahead.map { $0.signum() }).count == 1 else {
            return nil
        }
        let amount = DurationText.text(.seconds((abs(last) + 30) / 60 * 60))
        return
            "the clock of this machine is \(amount) \(last > 0 ? "ahead of" : "behind") APNs': set it, and keep it right with NTP"
    }
}
