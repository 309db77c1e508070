internal import TokenModel

/// What a batch of results says about tokens.
///
/// An operator may undo one of them and not another, so observations of one token are not merged.
struct Observations {
    struct Place: Hashable {
        var environment: Environment
        var topic: Topic
    }

    /// The results that were not recorded, by their row in the batch, and the guards that tripped or reset.
    struct Outcome {
        /// Suspects and 410s that the mass-failure guard holds, with what they would be recorded as.
        var held: [Int: HeldResult] = [:]
        /// Results to be retried: another session has locked their token, or is adding their topic.
        var waiting: Set<Int> = []
        /// Results of topics that are in another database now.
        var moved: Set<Int> = []
        var transitions: [GuardTransition] = []
    }

    private(set) var all: [Observation] = []
    /// Environments and topics, in the order in which they were met.
    private(set) var places: [Place] = []
    private var placeOf: [Place: Int] = [:]

    /// Adds what a verdict says about the token. Verdicts that say nothing about it add nothing.
    mutating func add(_ verdict: Verdict, of result: SendResult, row: Int) {
        switch verdict {
        case .stale(let address, let at, let reason):
            add(address, at, reason, isSuspect: false, of: result, row: row)
        case .suspect(let address, let at, let reason):
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
        let (busy, held, moved, changes) = try connection.query(
            """
            SELECT r.busy, r.held, r.moved, \(GuardTransition.columns)
            FROM tokenkeeper.ensure_topics($1, $2) AS t (ids)
            CROSS JOIN LATERAL tokenkeeper.record(ARRAY(
                SELECT tokenkeeper.invalidation_of(
                    o.n::integer, t.ids[o.place], o.token_key, CASE WHEN o.is_suspect THEN 'suspect' ELSE 'stale' END, o.at, o.reason, o.queued_at,
                    o.is_released)
                FROM unnest($3, $4, $5, $6, $7, $8, $9) WITH ORDINALITY
                    AS o (place, token_key, is_suspect, at, reason, queued_at, is_released, n)),
                $10, $11 / 1000000::numeric, $12 / 1000000::numeric) AS r
            """,
            [
                .texts(places.map(\.environment.rawValue)), .texts(places.map(\.topic.name)),
                .int4s(all.map { Int32($0.place + 1) }), .byteas(all.map(\.token.bytes)), .bools(all.map(\.isSuspect)),
                .instants(all.map(\.at)), .texts(all.map(\.reason)), .instants(all.map(\.queuedAt)),
                .bools(all.map(\.isReleased)), .int8(limits.allowance), .int8(limits.maxShare.millionths),
                .int8(limits.holdStaleShare.millionths),
            ]
        ).one { row throws(DatabaseError) in
            (
                try row.read([Int32].self), try row.read([Int32].self), try row.read([Int32].self),
                (try row.read([Int32].self), try row.read([String].self), try row.read([Bool].self))
            )
        }
        var outcome = Outcome()
        for n in busy { outcome.waiting.insert(all[Int(n) - 1].row) }
        for n in moved { outcome.moved.insert(all[Int(n) - 1].row) }
        for n in held { hold(all[Int(n) - 1], in: &outcome) }
        outcome.transitions = try GuardTransition.read(changes.0, changes.1, changes.2, on: &connection)
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
