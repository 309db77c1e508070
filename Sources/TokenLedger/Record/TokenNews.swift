package import TokenModel

/// What a batch of results says of tokens: each token once, with the greatest instant of each cause.
///
/// Greatest first by instant and on a tie by reason, so that the ledger does not depend on the order of arrival.
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

    private struct Words {
        var dead: Word?
        var suspect: Word?
    }

    private var words: [TokenAddress: Words] = [:]

    package init() {}

    /// Adds what one verdict says; verdicts that do not speak of the token add nothing.
    package mutating func add(_ verdict: Verdict) {
        switch verdict {
        case .dead(let address, let at, let reason):
            let known = words[address]?.dead
            words[address, default: Words()].dead = Word.greater(known, Word(at: at, reason: reason))
        case .suspect(let address, let at, let reason):
            let known = words[address]?.suspect
            words[address, default: Words()].suspect = Word.greater(known, Word(at: at, reason: reason))
        case .accepted, .sendersFault, .transient, .unintelligible:
            break
        }
    }

    /// Records everything in the transaction that is open.
    ///
    /// - Returns: The tokens that somebody holds locked: nothing of those was recorded.
    package func record(on connection: inout Connection) throws(DatabaseError) -> Set<TokenAddress> {
        if words.isEmpty { return [] }
        let addresses = words.keys.sorted()
        var topics: [(environment: Environment, topic: Topic)] = []
        var ofTopic: [Int32?] = []
        for address in addresses {
            if topics.last?.environment != address.environment || topics.last?.topic != address.topic {
                topics.append((address.environment, address.topic))
            }
            ofTopic.append(Int32(topics.count))
        }
        let said = addresses.map { words[$0] ?? Words() }
        let locked = try connection.query(
            "SELECT tokenkeeper.record($1, $2, $3, $4, $5, $6, $7, $8)",
            [
                .texts(topics.map(\.environment.rawValue)), .texts(topics.map(\.topic.name)),
                .int4s(ofTopic), .byteas(addresses.map(\.token.bytes)),
                .instants(said.map { $0.dead?.at }), .texts(said.map { $0.dead?.reason }),
                .instants(said.map { $0.suspect?.at }), .texts(said.map { $0.suspect?.reason }),
            ])
        return Set((0..<locked.count).compactMap { locked.integer($0, 0).map { addresses[Int($0) - 1] } })
    }
}
