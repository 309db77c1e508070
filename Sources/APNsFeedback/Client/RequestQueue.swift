/// Requests that wait to be sent, in their order. Requests that came back unsent go first.
struct RequestQueue {
    private var waiting: [Delivery] = []
    /// How many at the front of `waiting` are gone.
    private var gone = 0
    private var returned: [Delivery] = []

    var count: Int { returned.count + waiting.count - gone }
    var isEmpty: Bool { count == 0 }

    mutating func append(_ delivery: Delivery) {
        waiting.append(delivery)
    }

    mutating func giveBack(_ delivery: Delivery) {
        returned.append(delivery)
    }

    /// - Parameter unsent: Whether one that was never sent goes first: a connection is not to be judged by a request that has got no response before.
    mutating func next(unsent: Bool) -> Delivery? {
        guard unsent, let last = returned.last ?? (gone < waiting.count ? waiting[gone] : nil), last.sends > 0 else {
            return next()
        }
        if let place = returned.lastIndex(where: { $0.sends == 0 }) { return returned.remove(at: place) }
        if let place = waiting[gone...].firstIndex(where: { $0.sends == 0 }) { return waiting.remove(at: place) }
        return next()
    }

    mutating func next() -> Delivery? {
        if let first = returned.popLast() { return first }
        guard gone < waiting.count else { return nil }
        defer {
            gone += 1
            // On average, each element moves once.
            if gone > 1024, gone * 2 > waiting.count {
                waiting.removeSubrange(..<gone)
                gone = 0
            } else if gone == waiting.count {
                waiting.removeAll(keepingCapacity: gone <= 1024)
                gone = 0
            }
        }
        return waiting[gone]
    }

    /// Takes out those that meet the condition.
    mutating func take(where isMeant: (Delivery) -> Bool) -> [Delivery] {
        let taken = returned.reversed().filter(isMeant) + waiting[gone...].filter(isMeant)
        if taken.isEmpty { return [] }
        returned.removeAll(where: isMeant)
        waiting = waiting[gone...].filter { !isMeant($0) }
        gone = 0
        return taken
    }

    /// Empties it.
    mutating func takeAll() -> [Delivery] {
        defer { self = RequestQueue() }
        return returned.reversed() + waiting[gone...]
    }
}
