internal import TokenModel

/// What a batch of results says about tokens.
///
/// An operator may undo one of them and not another, so observations of one token are not merged.
struct Observations {
    struct Place: Hashable, Comparable {
        var environment: Environment
        var topic: Topic

        /// All daemons lock in this order, so that two batches never deadlock.
        static func < (left: Place, right: Place) -> Bool {
            (left.environment.rawValue, left.topic) < (right.environment.rawValue, right.topic)
        }
    }

    /// The results that were not recorded, by their row in the batch, and the guards that tripped or reset.
    struct Outcome {
        /// Suspects and 410s that the mass-failure guard holds, with what they would be recorded as.
        var held: [Int: HeldResult] = [:]
        /// Results to be retried: another session has locked their token, or the guard of their topic.
        var waiting: Set<Int> = []
        var transitions: [GuardTransition] = []
    }

    private(set) var all: [Observation] = []
    /// Environments and topics, in the order in which they were met.
    private(set) var places: [Place] = []
    private var placeOf: [Place: Int] = [:]
    /// Whether there are suspects for the mass-failure guard to judge.
    private(set) var hasSuspects = false

    /// Adds what a verdict says about the token. Verdicts that say nothing about it add nothing.
    mutating func add(_ verdict: Verdict, of result: SendResult, row: Int) {
        switch verdict {
        case .stale(let address, let at, let reason):
            add(address, at, reason, isSuspect: false, of: result, row: row)
        case .suspect(let address, let at, let reason):
            hasSuspects = true
            add(address, at, reason, isSuspect: true, of: result, row: row)
        case .accepted, .sendersFault, .transient, .unintelligible:
            break
        }
    }

    private mutating func add(
        _ address: TokenAddress, _ at: Instant, _ reason: String, isSuspect: Bool, of result: SendResult, row: Int
    ) {
        all.append(
            Observation(
                row: row, place: place(of: address), token: address.token, at: at, reason: reason,
                isSuspect: isSuspect, queuedAt: result.queuedAt, isReleased: result.isReleased))
    }

    private mutating func place(of address: TokenAddress) -> Int {
        let place = Place(environment: address.environment, topic: address.topic)
        // Most results have the same topic as the one before them.
        if let last = all.last?.place, places[last] == place { return last }
        if let known = placeOf[place] { return known }
        places.append(place)
        placeOf[place] = places.count - 1
        return places.count - 1
    }

    /// Records everything in the open transaction.
    func record(_ limits: GuardLimits, on connection: inout Connection) throws(DatabaseError) -> Outcome {
        if all.isEmpty { return Outcome() }
        let arguments = RecordArguments(self)
        let rows = try connection.query(
            """
            SELECT locked_token, held_token, held_suspect, waiting_suspect, tripped_topic, reset_topic
            FROM tokenkeeper.record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,
                                    $19 / 1000000::numeric, $20 / 1000000::numeric)
            """, arguments.parameters(limits))
        return try outcome(rows, arguments, on: &connection)
    }

    /// Reads the rows that `tokenkeeper.record` returns.
    private func outcome(
        _ rows: borrowing Rows, _ arguments: RecordArguments, on connection: inout Connection
    ) throws(DatabaseError) -> Outcome {
        var outcome = Outcome()
        var transitions: [(topic: Int, tripped: Bool)] = []
        // Each column is an index, from 1, and each row has one of them.
        _ = try rows.decode { row throws(DatabaseError) in
            let indexes = try (0..<6).map { _ throws(DatabaseError) in try row.read(Int?.self).map { $0 - 1 } }
            if let locked = indexes[0] {
                for observation in arguments.observationsOf[locked] { outcome.waiting.insert(all[observation].row) }
            }
            if let held = indexes[1] {
                for observation in arguments.observationsOf[held] where !all[observation].isSuspect {
                    hold(all[observation], in: &outcome)
                }
            }
            if let held = indexes[2] { hold(arguments.suspects[held], in: &outcome) }
            if let waiting = indexes[3] { outcome.waiting.insert(arguments.suspects[waiting].row) }
            if let tripped = indexes[4] { transitions.append((tripped, true)) }
            if let reset = indexes[5] { transitions.append((reset, false)) }
        }
        for transition in transitions {
            let place = arguments.places[transition.topic]
            outcome.transitions.append(
                try GuardTransition(place.environment, place.topic, tripped: transition.tripped, on: &connection))
        }
        return outcome
    }

    private func hold(_ observation: Observation, in outcome: inout Outcome) {
        outcome.held[observation.row] = HeldResult(
            row: observation.row,
            address: TokenAddress(
                environment: places[observation.place].environment, topic: places[observation.place].topic,
                token: observation.token),
            isSuspect: observation.isSuspect, at: observation.at, reason: observation.reason)
    }
}
