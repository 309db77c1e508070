internal import TokenModel

/// The arrays that `tokenkeeper.record` takes: topics and tokens, each once, in the order in which all daemons lock them; and their 410s and suspects.
struct RecordArguments {
    private(set) var places: [Observations.Place]

    // By token.

    /// The observations of each token, as indices into `Observations.all`.
    private(set) var observationsOf: [ArraySlice<Int>] = []
    /// The place of each token, from 1.
    private var placeOf: [Int32?] = []
    private var keys: [[UInt8]] = []
    /// The greatest 410 of each token; nil when it has only suspects.
    private var stale: [Observation?] = []
    /// Whether an operator has released one of the token's 410s.
    private var isReleased: [Bool] = []

    // By further 410 of a token: usually there is none.

    private var further: [Observation] = []
    /// The token of each further 410, from 1.
    private var furtherOf: [Int32?] = []

    // By suspect.

    private(set) var suspects: [Observation] = []
    /// The token of each suspect, from 1.
    private var tokenOf: [Int32?] = []

    init(_ observations: Observations) {
        let order = observations.places.indices.sorted { observations.places[$0] < observations.places[$1] }
        places = order.map { observations.places[$0] }
        var rank = [Int](repeating: 0, count: order.count)
        for (position, place) in order.enumerated() { rank[place] = position }
        addTokens(of: observations.all, rank)
    }

    private mutating func addTokens(of observations: [Observation], _ rank: [Int]) {
        let order = observations.indices.sorted { left, right in
            let (a, b) = (observations[left], observations[right])
            if a.place != b.place { return rank[a.place] < rank[b.place] }
            return a.token != b.token ? a.token < b.token : a.row < b.row
        }
        keys.reserveCapacity(order.count)
        var first = order.startIndex
        while first < order.endIndex {
            let one = observations[order[first]]
            var next = first
            var greatest: Observation?
            var released = false
            while next < order.endIndex, observations[order[next]].place == one.place,
                observations[order[next]].token == one.token
            {
                let observation = observations[order[next]]
                if observation.isSuspect {
                    suspects.append(observation)
                    tokenOf.append(Int32(keys.count + 1))
                } else {
                    let now = Observation.greater(greatest, observation)
                    if let greatest {
                        further.append(now.row == greatest.row ? observation : greatest)
                        furtherOf.append(Int32(keys.count + 1))
                    }
                    greatest = now
                    released = released || observation.isReleased
                }
                next += 1
            }
            observationsOf.append(order[first..<next])
            placeOf.append(Int32(rank[one.place] + 1))
            keys.append(one.token.bytes)
            stale.append(greatest)
            isReleased.append(released)
            first = next
        }
    }

    func parameters(_ limits: GuardLimits) -> [Parameter] {
        [
            .texts(places.map(\.environment.rawValue)), .texts(places.map(\.topic.name)),
            .int4s(placeOf), .byteas(keys), .instants(stale.map { $0?.at }), .texts(stale.map { $0?.reason }),
            .instants(stale.map { $0?.queuedAt }), .bools(isReleased),
            .int4s(furtherOf), .instants(further.map(\.at)), .texts(further.map(\.reason)),
            .instants(further.map(\.queuedAt)),
            .int4s(tokenOf), .instants(suspects.map(\.at)), .texts(suspects.map(\.reason)),
            .instants(suspects.map(\.queuedAt)), .bools(suspects.map(\.isReleased)), .int8(limits.allowance),
            .int8(limits.maxShare.millionths), .int8(limits.holdsStale ? limits.holdStaleShare.millionths : nil),
        ]
    }
}
