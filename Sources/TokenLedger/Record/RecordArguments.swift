internal import TokenModel

/// The arrays that `tokenkeeper.record` takes: topics and tokens, each once, in the order in which all daemons lock them; and suspects.
struct RecordArguments {
    private(set) var places: [Observations.Place]

    // By token.

    /// The observations of each token, as indices into `Observations.all`.
    private(set) var observationsOf: [ArraySlice<Int>] = []
    /// The place of each token, from 1.
    private var placeOf: [Int32?] = []
    private var keys: [[UInt8]] = []
    /// The greatest 410 of each token; nil when it has only suspects.
    private var staleAt: [Instant?] = []
    private var staleReason: [String?] = []

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
            while next < order.endIndex, observations[order[next]].place == one.place,
                observations[order[next]].token == one.token
            {
                let observation = observations[order[next]]
                if observation.suspect == nil {
                    greatest = Observation.greater(greatest, observation)
                } else {
                    suspects.append(observation)
                    tokenOf.append(Int32(keys.count + 1))
                }
                next += 1
            }
            observationsOf.append(order[first..<next])
            placeOf.append(Int32(rank[one.place] + 1))
            keys.append(one.token.bytes)
            staleAt.append(greatest?.at)
            staleReason.append(greatest?.reason)
            first = next
        }
    }

    func parameters(_ limits: GuardLimits) -> [Parameter] {
        [
            .texts(places.map(\.environment.rawValue)), .texts(places.map(\.topic.name)),
            .int4s(placeOf), .byteas(keys), .instants(staleAt), .texts(staleReason),
            .int4s(tokenOf), .instants(suspects.map(\.at)), .texts(suspects.map(\.reason)),
            .instants(suspects.map { $0.suspect?.queuedAt }),
            .bools(suspects.map { $0.suspect?.isReleased ?? false }), .int8(limits.allowance),
            .int8(limits.maxShare.millionths),
        ]
    }
}
