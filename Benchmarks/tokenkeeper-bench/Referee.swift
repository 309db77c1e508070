/// What the contestants of each round have left behind, and who left something else than the one that all are compared with.
final class Referee {
    private let reference: String
    private var states: [String: [String: LedgerState]] = [:]

    init(reference: String) {
        self.reference = reference
    }

    /// Notes what a contestant has done. Contestants of the same round are compared with each other.
    func note(_ name: String, round: String, _ session: Session) throws {
        states[round, default: [:]][name] = try LedgerState(session)
    }

    /// What to say of a contestant's figure: nothing, or that it has done something else.
    func verdict(_ name: String) -> String? {
        for (round, states) in states {
            guard let expected = states[reference], let state = states[name], state != expected else { continue }
            Progress.say(
                "DISQUALIFIED: \(name), round \(round): \(state.description)\n  \(reference): \(expected.description)")
            return "DISQUALIFIED: another ledger than that of \(reference)"
        }
        return nil
    }
}
