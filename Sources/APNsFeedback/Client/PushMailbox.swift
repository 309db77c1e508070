internal import Synchronization
internal import TokenModel

/// What a client's thread and all other threads exchange.
final class PushMailbox: Sendable {
    private struct Contents {
        var inbox: [PushRequest] = []
        var outcomes: [PushOutcome] = []
        var stopBy: ContinuousClock.Instant?
        var isOver = false
        var state = PushClientState()
    }

    private let contents = Mutex(Contents())

    /// - Returns: False if the client has stopped. The requests then end as withdrawn.
    func put(_ requests: [PushRequest]) -> Bool {
        contents.withLock { contents in
            if contents.isOver {
                contents.outcomes += requests.map { Delivery($0).outcome(.withdrawn) }
                return false
            }
            contents.inbox += requests
            return true
        }
    }

    func takeRequests() -> (requests: [PushRequest], stopBy: ContinuousClock.Instant?) {
        contents.withLock { contents in
            defer { contents.inbox = [] }
            return (contents.inbox, contents.stopBy)
        }
    }

    func put(_ outcomes: inout [PushOutcome], _ state: PushClientState) {
        contents.withLock { contents in
            contents.state = state
            if contents.outcomes.isEmpty { swap(&contents.outcomes, &outcomes) } else { contents.outcomes += outcomes }
        }
        outcomes.removeAll(keepingCapacity: true)
    }

    func takeOutcomes() -> [PushOutcome] {
        contents.withLock { contents in
            defer { contents.outcomes = [] }
            return contents.outcomes
        }
    }

    /// Of two stops, the earlier one counts.
    func stop(by end: ContinuousClock.Instant) {
        contents.withLock { $0.stopBy = min($0.stopBy ?? end, end) }
    }

    /// The thread takes no more requests: the rest end as withdrawn.
    func close() {
        contents.withLock { contents in
            contents.isOver = true
            contents.outcomes += contents.inbox.map { Delivery($0).outcome(.withdrawn) }
            contents.inbox = []
            contents.state = PushClientState(opened: contents.state.connectionsOpened)
        }
    }

    var state: PushClientState {
        contents.withLock { contents in
            var state = contents.state
            state.queued += contents.inbox.count
            return state
        }
    }
}

/// How much a client has to do, and how many connections it uses.
public struct PushClientState: Sendable, Equatable {
    /// Requests that wait to be sent.
    public internal(set) var queued = 0
    /// Requests that have a stream and no response yet.
    public internal(set) var inFlight = 0
    /// Connections opened since the client started.
    public internal(set) var connectionsOpened = 0
    /// Open connections, including those that are still connecting.
    public internal(set) var connectionsOpen = 0
    /// The last GOAWAY that a server sent with an error or a text; nil if there was none.
    public internal(set) var goAway: PushGoAway?

    init() {}

    init(opened: Int) {
        connectionsOpened = opened
    }
}
