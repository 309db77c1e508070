import Synchronization

/// The requests and connections that a server has seen so far. Readable at any time, from any thread.
public final class FakeRecords: Sendable {
    private struct State {
        var outcomes: [FakeOutcome: Int] = [:]
        var identifiers: [String: Int] = [:]
        var refusals: [String: Int] = [:]
        var refused = 0
        var exchanges: [FakeExchange] = []
        var accepted = 0
        var open = 0
        var streams = 0
        var mostStreams = 0
        var mostStreamsOfOne = 0
        var faults: [String] = []
    }

    private let state = Mutex(State())
    private let kept: Int

    init(_ records: FakeOptions.Records) {
        switch records {
        case .counts: kept = 0
        case .latest(let count): kept = count
        }
    }

    // For questions -------------------------------------------------------------------------------------------------

    /// Requests that arrived whole, by their outcome; refused ones included.
    public var outcomes: [FakeOutcome: Int] { state.withLock { $0.outcomes } }
    public var requests: Int { state.withLock { $0.outcomes.values.reduce(0, +) } }
    public func count(_ status: Int, _ reason: String = "") -> Int {
        state.withLock { $0.outcomes[FakeOutcome(status, reason)] ?? 0 }
    }

    /// The requests that were refused: the client was told by REFUSED_STREAM or GOAWAY that they were not processed. Those that had not
    /// arrived whole when they were refused are not counted anywhere.
    public var refused: Int { state.withLock { $0.refused } }
    /// The requests that were processed: all but the refused ones.
    public var seen: Int { state.withLock { $0.outcomes.values.reduce(0, +) - $0.refused } }

    /// The latest requests and their answers, in the order in which the requests were complete. Empty with `.counts`.
    public var exchanges: [FakeExchange] { state.withLock { Array($0.exchanges.suffix(kept)) } }
    /// How many requests with this `apns-id` were processed. Always 0 with `.counts`.
    public func count(of apnsID: String) -> Int { state.withLock { $0.identifiers[apnsID] ?? 0 } }
    /// The same for all that had an `apns-id` of their own.
    public var identifiers: [String: Int] { state.withLock { $0.identifiers } }
    /// How often requests with an `apns-id` of their own were refused, by `apns-id`. Empty with `.counts`.
    public var refusals: [String: Int] { state.withLock { $0.refusals } }

    /// Connections that were accepted, counted before TLS.
    public var connections: Int { state.withLock { $0.accepted } }
    public var openConnections: Int { state.withLock { $0.open } }
    /// Requests that have begun and are not answered yet.
    public var streams: Int { state.withLock { $0.streams } }
    /// The most streams at once, over all connections.
    public var mostStreams: Int { state.withLock { $0.mostStreams } }
    /// The most streams at once of a single connection.
    public var mostStreamsOfOneConnection: Int { state.withLock { $0.mostStreamsOfOne } }
    /// The first hundred errors of TLS and HTTP/2, in words.
    public var faults: [String] { state.withLock { $0.faults } }

    // For connections -----------------------------------------------------------------------------------------------

    func exchanged(_ exchange: FakeExchange) {
        state.withLock { state in
            state.outcomes[exchange.outcome, default: 0] += 1
            if exchange.isRefused { state.refused += 1 }
            guard kept > 0 else { return }
            if exchange.request.hasOwnID {
                if exchange.isRefused {
                    state.refusals[exchange.request.apnsID, default: 0] += 1
                } else {
                    state.identifiers[exchange.request.apnsID, default: 0] += 1
                }
            }
            state.exchanges.append(exchange)
            if state.exchanges.count >= 2 * kept { state.exchanges.removeFirst(state.exchanges.count - kept) }
        }
    }

    /// A GOAWAY has refused a request whose answer was decided but not sent.
    func takenBack(_ earlier: FakeExchange, _ exchange: FakeExchange) {
        let id = exchange.request.apnsID
        state.withLock { state in
            Self.lower(&state.outcomes, earlier.outcome)
            state.outcomes[exchange.outcome, default: 0] += 1
            state.refused += 1
            guard kept > 0 else { return }
            if exchange.request.hasOwnID {
                Self.lower(&state.identifiers, id)
                state.refusals[id, default: 0] += 1
            }
            let place = state.exchanges.lastIndex { $0.request.ordinal == exchange.request.ordinal }
            if let place { state.exchanges[place] = exchange }
        }
    }

    private static func lower<Key>(_ counts: inout [Key: Int], _ key: Key) {
        let left = (counts[key] ?? 1) - 1
        counts[key] = left == 0 ? nil : left
    }

    /// The connection's number, counted from 1.
    func connected() -> Int {
        state.withLock { state in
            state.accepted += 1
            state.open += 1
            return state.accepted
        }
    }

    func disconnected() {
        state.withLock { $0.open -= 1 }
    }

    func streamOpened(ofConnection count: Int) {
        state.withLock { state in
            state.streams += 1
            if state.streams > state.mostStreams { state.mostStreams = state.streams }
            if count > state.mostStreamsOfOne { state.mostStreamsOfOne = count }
        }
    }

    func streamsClosed(_ count: Int) {
        state.withLock { $0.streams -= count }
    }

    func fault(_ error: any Error) {
        state.withLock { state in
            if state.faults.count < 100 { state.faults.append("\(error)") }
        }
    }
}
