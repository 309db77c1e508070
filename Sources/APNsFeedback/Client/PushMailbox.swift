internal import Synchronization
public import TokenModel

/// What a client's thread and all other threads exchange.
final class PushMailbox: Sendable {
    private struct Contents {
        var inbox: [PushRequest] = []
        var withdrawn: Set<Int> = []
        var withdrawnUnsent: Set<Int> = []
        var unwanted: Set<Environment> = []
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

    /// What the thread has to do.
    struct Orders {
        /// The slots of requests to be taken back. They were taken out of the mailbox before those in `requests` were put in.
        var withdrawn: Set<Int> = []
        /// Only if no server can have any of them.
        var withdrawnUnsent: Set<Int> = []
        /// The servers whose connections are to be replaced.
        var unwanted: Set<Environment> = []
        var requests: [PushRequest] = []
        var stopBy: ContinuousClock.Instant?

        var isEmpty: Bool {
            withdrawn.isEmpty && withdrawnUnsent.isEmpty && unwanted.isEmpty && requests.isEmpty && stopBy == nil
        }
    }

    func takeOrders() -> Orders {
        contents.withLock { contents in
            defer {
                (contents.inbox, contents.withdrawn, contents.withdrawnUnsent, contents.unwanted) = ([], [], [], [])
            }
            return Orders(
                withdrawn: contents.withdrawn, withdrawnUnsent: contents.withdrawnUnsent, unwanted: contents.unwanted,
                requests: contents.inbox,
                stopBy: contents.stopBy)
        }
    }

    /// - Returns: Whether that ended any request: one that the thread has not taken.
    func withdraw(_ slots: Set<Int>, ifUnsent isIfUnsent: Bool = false) -> Bool {
        contents.withLock { contents in
            if isIfUnsent { contents.withdrawnUnsent.formUnion(slots) } else { contents.withdrawn.formUnion(slots) }
            let ended = contents.inbox.filter { slots.contains($0.slot) }
            if ended.isEmpty { return false }
            contents.inbox.removeAll { slots.contains($0.slot) }
            contents.outcomes += ended.map { Delivery($0).outcome(.withdrawn) }
            return true
        }
    }

    func reconnect(_ environment: Environment) {
        contents.withLock { _ = $0.unwanted.insert(environment) }
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
    /// Connections opened since the client started.
    public internal(set) var connectionsOpened = 0
    private var production = Server()
    private var sandbox = Server()
    /// What each environment's server holds against the sender, now or earlier.
    public internal(set) var faults: [Environment: PushFault] = [:]
    /// How often the client's thread has gone through its loop. Tests see by it that it does not spin.
    var turns = 0

    /// What goes on with the server of one environment.
    public struct Server: Sendable, Equatable {
        /// Requests that have a stream and no response yet.
        public internal(set) var inFlight = 0
        /// Open connections, including those that are still connecting.
        public internal(set) var connectionsOpen = 0
    }

    public internal(set) subscript(environment: Environment) -> Server {
        get { environment == .production ? production : sandbox }
        set { if environment == .production { production = newValue } else { sandbox = newValue } }
    }

    init() {}

    init(opened: Int) {
        connectionsOpened = opened
    }
}
