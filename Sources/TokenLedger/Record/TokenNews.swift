package import TokenModel

/// What a batch of results says of tokens: of the 410s each token once, with the greatest; of the suspects each one.
///
/// Greatest first by instant and on a tie by reason, so that the ledger does not depend on the order of arrival. Suspects are
/// not merged, because an operator may undo one and not the other.
package struct TokenNews {
    private struct Word {
        var at: Instant
        var reason: String

        /// Reasons compare byte by byte, as the column does.
        static func greater(_ left: Word?, _ right: Word) -> Word {
            guard let left else { return right }
            if left.at != right.at { return left.at > right.at ? left : right }
            return right.reason.utf8.lexicographicallyPrecedes(left.reason.utf8) ? left : right
        }
    }

    /// One result that makes its token suspect.
    private struct Suspect {
        /// Of the result, in the caller's count.
        var position: Int
        var address: TokenAddress
        var word: Word
        var queuedAt: Instant
        var isReleased: Bool
    }

    /// What became of the news, but for what was recorded.
    package struct Outcome {
        /// Tokens that somebody holds locked: nothing of those was recorded.
        package var locked: Set<TokenAddress> = []
        /// Positions of suspects that the mass-failure guard holds back, with what they would count as.
        package var held: [Int: (address: TokenAddress, at: Instant, reason: String)] = [:]
        /// Positions of suspects that are to be tried again, because somebody is at their topic's guard.
        package var waiting: Set<Int> = []
        package var turns: [GuardTurn] = []
    }

    private var dead: [TokenAddress: Word] = [:]
    private var suspects: [Suspect] = []

    package init() {}

    /// Adds what one verdict says; verdicts that do not speak of the token add nothing.
    ///
    /// - Parameter position: Which of the caller's results it is.
    package mutating func add(_ verdict: Verdict, of result: SendResult, at position: Int) {
        switch verdict {
        case .dead(let address, let at, let reason):
            dead[address] = Word.greater(dead[address], Word(at: at, reason: reason))
        case .suspect(let address, let at, let reason):
            suspects.append(
                Suspect(
                    position: position, address: address, word: Word(at: at, reason: reason),
                    queuedAt: result.queuedAt, isReleased: result.isReleased))
        case .accepted, .sendersFault, .transient, .unintelligible:
            break
        }
    }

    /// Records everything in the transaction that is open.
    package func record(_ limits: GuardLimits, on connection: inout Connection) throws(DatabaseError) -> Outcome {
        if dead.isEmpty && suspects.isEmpty { return Outcome() }
        let addresses = Set(dead.keys).union(suspects.map(\.address)).sorted()
        var positions: [TokenAddress: Int32] = [:]
        var topics: [(environment: Environment, topic: Topic)] = []
        var ofTopic: [Int32?] = []
        for address in addresses {
            if topics.last?.environment != address.environment || topics.last?.topic != address.topic {
                topics.append((address.environment, address.topic))
            }
            ofTopic.append(Int32(topics.count))
            positions[address] = Int32(ofTopic.count)
        }
        let rows = try connection.query(
            """
            SELECT fate, at_position
            FROM tokenkeeper.record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13 / 1000000::numeric)
            """,
            [
                .texts(topics.map(\.environment.rawValue)), .texts(topics.map(\.topic.name)),
                .int4s(ofTopic), .byteas(addresses.map(\.token.bytes)),
                .instants(addresses.map { dead[$0]?.at }), .texts(addresses.map { dead[$0]?.reason }),
                .int4s(suspects.map { positions[$0.address] }), .instants(suspects.map(\.word.at)),
                .texts(suspects.map(\.word.reason)), .instants(suspects.map(\.queuedAt)),
                .bools(suspects.map(\.isReleased)), .int8(limits.minTokens), .int8(limits.maxShare.millionths),
            ])
        var outcome = Outcome()
        for row in 0..<rows.count {
            guard let index = rows.integer(row, 1).map({ Int($0) - 1 }) else { continue }
            switch rows.text(row, 0) {
            case "locked":
                outcome.locked.insert(addresses[index])
            case "held":
                let suspect = suspects[index]
                outcome.held[suspect.position] = (suspect.address, suspect.word.at, suspect.word.reason)
            case "waits":
                outcome.waiting.insert(suspects[index].position)
            case let turn?:
                let (environment, topic) = topics[index]
                outcome.turns.append(try GuardTurn(environment, topic, opened: turn == "opened", on: &connection))
            case nil:
                break
            }
        }
        return outcome
    }
}
