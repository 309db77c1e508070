internal import TokenLedger
internal import TokenModel

/// The requests that this daemon has claimed with one credential for one environment. Pure.
///
/// Only one request per token is in flight; the others queue behind it in order. So the first response decides about all of them:
/// after a 410, the others are never sent.
struct RequestsInFlight {
    private struct Queue {
        var requests: [ClaimedRequest]
        /// Whether the first request was handed to the client. The others never were.
        var isInFlight = true

        var unsent: ArraySlice<ClaimedRequest> { requests.dropFirst(isInFlight ? 1 : 0) }
    }

    private var queues: [TokenAddress: Queue] = [:]
    /// The tokens whose next request may go, in the order in which the last one ended. Some may have no request any more.
    private var ready: [TokenAddress] = []
    /// The number of requests, queued ones included.
    private(set) var count = 0

    var isEmpty: Bool { queues.isEmpty }

    /// Adds requests that were claimed a moment ago. One that it has already, from an earlier claim, goes on as it is.
    ///
    /// - Returns: The requests to send now.
    mutating func take(_ claimed: [ClaimedRequest]) -> [ClaimedRequest] {
        claimed.compactMap { claimed in
            let address = claimed.request.address
            if queues[address] != nil {
                if holds(claimed) { return nil }
                count += 1
                queues[address]?.requests.append(claimed)
                return nil
            }
            count += 1
            queues[address] = Queue(requests: [claimed])
            return claimed
        }
    }

    /// The `request_id` of every request.
    var numbers: Set<Int64> { Set(queues.values.lazy.flatMap(\.requests).map(\.number)) }

    /// The `request_id` of the requests that the client has and that meet the condition.
    func inFlight(where isMeant: (ClaimedRequest) -> Bool) -> [Int64] {
        queues.values.compactMap { queue in
            guard queue.isInFlight, let first = queue.requests.first, isMeant(first) else { return nil }
            return first.number
        }
    }

    /// The `request_id` of every request of the tokens whose next request may go.
    var next: [Int64] { ready.flatMap { queues[$0]?.unsent.map(\.number) ?? [] } }

    /// Whether it has this request, by its number.
    func holds(_ claimed: ClaimedRequest) -> Bool {
        queues[claimed.request.address]?.requests.contains { $0.number == claimed.number } ?? false
    }

    /// Whether there is any request of a topic.
    func holds(_ topic: TopicScope) -> Bool { queues.keys.contains { $0.scope == topic } }

    /// Whether there is any request for a token.
    func holds(_ address: TokenAddress) -> Bool { queues[address] != nil }

    /// The request in flight for a token.
    func inFlight(_ address: TokenAddress) -> ClaimedRequest? {
        guard let queue = queues[address], queue.isInFlight else { return nil }
        return queue.requests.first
    }

    /// The request in flight has ended. The token's next one goes with `handOver`.
    mutating func ended(_ address: TokenAddress) {
        guard var queue = queues.removeValue(forKey: address) else { return }
        count -= 1
        queue.requests.removeFirst()
        if queue.requests.isEmpty { return }
        queue.isInFlight = false
        queues[address] = queue
        ready.append(address)
    }

    /// - Returns: The next request of each token whose last one has ended, to send now.
    mutating func handOver() -> [ClaimedRequest] {
        defer { ready = [] }
        return ready.compactMap { address in
            guard let queue = queues[address], !queue.isInFlight else { return nil }
            queues[address]?.isInFlight = true
            return queue.requests.first
        }
    }

    /// The request in flight has ended, and the token gets no more for now.
    ///
    /// - Returns: The queue behind it, to give back to the outbox.
    mutating func giveBack(_ address: TokenAddress) -> [ClaimedRequest] {
        guard let queue = queues.removeValue(forKey: address) else { return [] }
        count -= queue.requests.count
        return Array(queue.requests.dropFirst())
    }

    /// Takes out requests that the client does not have. A request in flight stays until its outcome arrives.
    ///
    /// - Returns: The requests that meet the condition.
    @discardableResult
    mutating func withdraw(where isMeant: (ClaimedRequest) -> Bool) -> [ClaimedRequest] {
        var withdrawn: [ClaimedRequest] = []
        for (address, queue) in queues {
            let meant = queue.unsent.filter(isMeant)
            if meant.isEmpty { continue }
            withdrawn += meant
            let kept = queue.requests.prefix(queue.isInFlight ? 1 : 0) + queue.unsent.filter { !isMeant($0) }
            queues[address] = kept.isEmpty ? nil : Queue(requests: Array(kept), isInFlight: queue.isInFlight)
        }
        count -= withdrawn.count
        return withdrawn
    }
}
