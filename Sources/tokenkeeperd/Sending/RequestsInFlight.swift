internal import TokenLedger
internal import TokenModel

/// The requests that this daemon has claimed with one credential for one environment. Pure.
///
/// Only one request per token is in flight; the others queue behind it in order. So the first response decides about all of them:
/// after a 410, the others are never sent.
struct RequestsInFlight {
    /// For each token, the request in flight and the queue behind it.
    private var queues: [TokenAddress: [ClaimedRequest]] = [:]
    /// The number of requests, queued ones included.
    private(set) var count = 0

    var isEmpty: Bool { queues.isEmpty }

    /// Adds claimed requests.
    ///
    /// - Returns: The requests to send now.
    mutating func take(_ claimed: [ClaimedRequest]) -> [PushRequest] {
        count += claimed.count
        return claimed.compactMap { claimed in
            queues[claimed.request.address, default: []].append(claimed)
            return queues[claimed.request.address]?.count == 1 ? claimed.request : nil
        }
    }

    /// The `request_id` of every request.
    var numbers: Set<Int64> { Set(queues.values.joined().map(\.number)) }

    /// Drops queued requests that another daemon has taken over. A request in flight stays until its outcome arrives.
    mutating func keep(only numbers: Set<Int64>) {
        for (address, queue) in queues {
            let kept = queue.prefix(1) + queue.dropFirst().filter { numbers.contains($0.number) }
            count -= queue.count - kept.count
            queues[address] = Array(kept)
        }
    }

    /// The request in flight for a token.
    func inFlight(_ address: TokenAddress) -> ClaimedRequest? { queues[address]?.first }

    /// The request in flight has ended.
    ///
    /// - Returns: The next one for the token, to send now.
    mutating func sendNext(_ address: TokenAddress) -> PushRequest? {
        guard var queue = queues.removeValue(forKey: address) else { return nil }
        count -= 1
        queue.removeFirst()
        if queue.isEmpty { return nil }
        queues[address] = queue
        return queue[0].request
    }

    /// The request in flight has ended, and the token gets no more for now.
    ///
    /// - Returns: The queue behind it, to give back to the outbox.
    mutating func giveBack(_ address: TokenAddress) -> [ClaimedRequest] {
        guard let queue = queues.removeValue(forKey: address) else { return [] }
        count -= queue.count
        return Array(queue.dropFirst())
    }
}
