/// Compares the states that the contestants of each round leave behind with the state of a reference contestant.
final class Referee {
    private let reference: String
    private var states: [String: [String: LedgerState]] = [:]

    init(reference: String) {
        self.reference = reference
    }

    /// Records the state of a contestant. Contestants of the same round are compared.
    func note(_ name: String, round: String, _ session: Session) throws {
        states[round, default: [:]][name] = try LedgerState(session)
    }

    /// The verdict on a contestant's figure: nil, or that its ledger differs.
    func verdict(_ name: String) -> String? {
        for (round, states) in states {
            guard let expected = states[reference], let state = states[name], state != expected else { continue }
            Progress.say(
                "DISQUALIFIED: \(name), round \(round): \(state.description)\n  \(reference): \(expected.description)")
            return "DISQUALIFIED: its ledger differs from that of \(reference)"
        }
        return nil
    }
}
