package import TokenModel

/// What a batch of results says of tokens: of the 410s each token once, with the greatest; of the suspects each one.
///
/// Greatest first by instant and on a tie by reason, so that the ledger does not depend on the order of arrival. Suspects are
/// not merged, because an operator may undo one and not the other.
package struct Observations {
    /// One result that says something of its token.
    private struct Word {
        /// Of the result, in the caller's count.
        var position: Int
        /// Of the environment and topic, in the order in which they were met.
        var place: Int
        var token: DeviceToken
        var at: Instant
        var reason: String
        /// Of a suspect; a 410 needs no more.
        var suspect: (queuedAt: Instant, isReleased: Bool)?

        /// Reasons compare byte by byte, as the column does.
        static func greater(_ left: Word?, _ right: Word) -> Word {
            guard let left else { return right }
            if left.at != right.at { return left.at > right.at ? left : right }
            return right.reason.utf8.lexicographicallyPrecedes(left.reason.utf8) ? left : right
        }
    }

    private struct Place: Hashable, Comparable {
        var environment: Environment
        var topic: Topic

        /// One order for all daemons, so that two batches never wait for each other crosswise.
        static func < (left: Place, right: Place) -> Bool {
            (left.environment.rawValue, left.topic) < (right.environment.rawValue, right.topic)
        }
    }

    /// What became of the news, but for what was recorded.
    package struct Outcome {
        /// Positions of results whose token somebody holds locked: nothing of those was recorded.
        package var locked: Set<Int> = []
        /// Positions of suspects that the mass-failure guard holds back, with what they would count as.
        package var held: [Int: (address: TokenAddress, at: Instant, reason: String)] = [:]
        /// Positions of suspects that are to be tried again, because somebody is at their topic's guard.
        package var waiting: Set<Int> = []
        package var turns: [GuardTransition] = []
    }

    private var words: [Word] = []
    private var places: [Place] = []
    private var placeOf: [Place: Int] = [:]
    /// Whether any of it is a suspect, for the mass-failure guard to judge.
    private(set) var hasSuspects = false

    package init() {}

    /// Adds what one verdict says; verdicts that do not speak of the token add nothing.
    ///
    /// - Parameter position: Which of the caller's results it is.
    package mutating func add(_ verdict: Verdict, of result: SendResult, at position: Int) {
        switch verdict {
        case .stale(let address, let at, let reason):
            words.append(
                Word(position: position, place: place(of: address), token: address.token, at: at, reason: reason))
        case .suspect(let address, let at, let reason):
            hasSuspects = true
            words.append(
                Word(
                    position: position, place: place(of: address), token: address.token, at: at, reason: reason,
                    suspect: (result.queuedAt, result.isReleased)))
        case .accepted, .sendersFault, .transient, .unintelligible:
            break
        }
    }

    private mutating func place(of address: TokenAddress) -> Int {
        let place = Place(environment: address.environment, topic: address.topic)
        // Most results are of the topic of the one before them.
        if let last = words.last?.place, places[last] == place { return last }
        if let known = placeOf[place] { return known }
        places.append(place)
        placeOf[place] = places.count - 1
        return places.count - 1
    }

    /// The arrays that `tokenkeeper.record` takes: each token once, in the order in which all daemons lock them.
    private struct Arrays {
        /// Which words speak of each token.
        var wordsOf: [ArraySlice<Int>] = []
        var ofPlace: [Int32?] = []
        var keys: [[UInt8]] = []
        var staleAt: [Instant?] = []
        var staleReason: [String?] = []
        /// The words that are suspects, and the token of each, from 1.
        var suspects: [Word] = []
        var suspectOf: [Int32?] = []
    }

    private func arrays(_ rank: [Int]) -> Arrays {
        let order = words.indices.sorted { left, right in
            let (a, b) = (words[left], words[right])
            if a.place != b.place { return rank[a.place] < rank[b.place] }
            return a.token != b.token ? a.token < b.token : a.position < b.position
        }
        var arrays = Arrays()
        arrays.keys.reserveCapacity(order.count)
        var first = order.startIndex
        while first < order.endIndex {
            let one = words[order[first]]
            var next = first
            var stale: Word?
            while next < order.endIndex, words[order[next]].place == one.place, words[order[next]].token == one.token {
                let word = words[order[next]]
                if word.suspect == nil {
                    stale = Word.greater(stale, word)
                } else {
                    arrays.suspects.append(word)
                    arrays.suspectOf.append(Int32(arrays.keys.count + 1))
                }
                next += 1
            }
            arrays.wordsOf.append(order[first..<next])
            arrays.ofPlace.append(Int32(rank[one.place] + 1))
            arrays.keys.append(one.token.bytes)
            arrays.staleAt.append(stale?.at)
            arrays.staleReason.append(stale?.reason)
            first = next
        }
        return arrays
    }

    /// Records everything in the transaction that is open.
    package func record(_ limits: GuardLimits, on connection: inout Connection) throws(DatabaseError) -> Outcome {
        if words.isEmpty { return Outcome() }
        let inOrder = places.indices.sorted { places[$0] < places[$1] }
        var rank = [Int](repeating: 0, count: places.count)
        for (position, place) in inOrder.enumerated() { rank[place] = position }
        let topics = inOrder.map { places[$0] }
        let tokens = arrays(rank)
        let rows = try connection.query(
            """
            SELECT locked_token, held_suspect, waiting_suspect, tripped_topic, reset_topic
            FROM tokenkeeper.record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13 / 1000000::numeric)
            """,
            [
                .texts(topics.map(\.environment.rawValue)), .texts(topics.map(\.topic.name)),
                .int4s(tokens.ofPlace), .byteas(tokens.keys), .instants(tokens.staleAt), .texts(tokens.staleReason),
                .int4s(tokens.suspectOf), .instants(tokens.suspects.map(\.at)), .texts(tokens.suspects.map(\.reason)),
                .instants(tokens.suspects.map { $0.suspect?.queuedAt }),
                .bools(tokens.suspects.map { $0.suspect?.isReleased ?? false }), .int8(limits.allowance),
                .int8(limits.maxShare.millionths),
            ])
        var outcome = Outcome()
        for row in 0..<rows.count {
            // Each column is an index, from 1, and each row has one of them.
            if let index = rows.index(row, 0) {
                for word in tokens.wordsOf[index] { outcome.locked.insert(words[word].position) }
            } else if let index = rows.index(row, 1) {
                let suspect = tokens.suspects[index]
                let place = places[suspect.place]
                let address = TokenAddress(
                    environment: place.environment, topic: place.topic, token: suspect.token)
                outcome.held[suspect.position] = (address, suspect.at, suspect.reason)
            } else if let index = rows.index(row, 2) {
                outcome.waiting.insert(tokens.suspects[index].position)
            } else if let index = rows.index(row, 3) {
                let place = topics[index]
                outcome.turns.append(try GuardTransition(place.environment, place.topic, opened: true, on: &connection))
            } else if let index = rows.index(row, 4) {
                let place = topics[index]
                outcome.turns.append(
                    try GuardTransition(place.environment, place.topic, opened: false, on: &connection))
            } else {
                throw DatabaseError(sqlState: "0A000", message: "tokenkeeper.record returned a row without a value")
            }
        }
        return outcome
    }
}

extension Rows {
    /// An array index that SQL counts from 1; nil for null.
    fileprivate func index(_ row: Int, _ column: Int) -> Int? { integer(row, column).map { Int($0) - 1 } }
}
