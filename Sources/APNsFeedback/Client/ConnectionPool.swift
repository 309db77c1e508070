internal import TokenModel

/// The connections to one server and its requests. Decides which connection gets the next request, when to open another connection,
/// when to back off from the server, and how each request ends. Pure: `PushWork` performs the actions and reports what happens.
struct ConnectionPool {
    struct Limits {
        /// The most requests in flight: 1 or more.
        var inFlight: Int
        /// The most connections that take requests: 1 or more.
        var connections: Int
        var answerTimeout: Duration
        var idleTimeout: Duration
    }

    enum Action {
        case end(PushOutcome)
        /// No server has processed the request of this slot.
        case didNotSend(slot: Int)
        case reset(connection: Int, stream: Int32)
        case ping(connection: Int)
        /// Close the connection. The pool no longer has it.
        case close(connection: Int, why: String)
    }

    /// What to do next for the waiting requests.
    enum Step {
        /// Begin to connect. Then call `connected`, `couldNotConnect` or `didNotConnect`.
        case connect(Int)
        /// Open a stream for the request. Then call `began` or `couldNotBegin`.
        case open(connection: Int, Delivery)
    }

    let server: PushServer
    let limits: Limits
    let renew: (String) -> Bool
    var connections: [ConnectionState] = []
    var queue = RequestQueue()
    var backoff = ServerBackoff()
    var isStopping = false
    /// When requests began to wait while none was in flight and no connection was being made.
    var waitsSince: ContinuousClock.Instant?
    var actions: [Action] = []
    /// The number of connections that were ever open.
    private(set) var opened = 0
    private var begun = 0
    /// How many streams a new connection begins with: see `ConnectionState.window`.
    private var window = ConnectionState.mostStreamsEver
    /// What the server last blamed the sender for; nil if it never did.
    private(set) var fault: PushFault?

    /// The most sockets, as a multiple of the connections that take requests. Draining connections need sockets too.
    static let mostSockets = 4

    /// - Parameter renew: Called with a provider token that APNs has refused. Returns whether there is another one now.
    init(_ server: PushServer, _ limits: Limits, renew: @escaping (String) -> Bool) {
        self.server = server
        self.limits = limits
        self.renew = renew
    }

    var queued: Int { queue.count }
    var inFlight: Int { connections.reduce(0) { $0 + $1.requests } }
    var sockets: Int { connections.count }
    var isBusy: Bool { !queue.isEmpty || inFlight > 0 }

    mutating func takeActions() -> [Action] {
        if actions.isEmpty { return [] }
        defer { actions.removeAll(keepingCapacity: true) }
        return actions
    }

    // MARK: - What to do next

    mutating func add(_ delivery: Delivery) {
        queue.append(delivery)
    }

    /// Call it until it returns nil.
    ///
    /// - Parameter mayConnect: False while connections to other servers must be ready first.
    mutating func next(at now: ContinuousClock.Instant, mayConnect isAllowed: Bool = true) -> Step? {
        if isStopping { return nil }
        guard !queue.isEmpty else { return isAllowed && needsReplacement(at: now) ? connect(at: now) : nil }
        if let pause = backoff.remaining(at: now), !connections.contains(where: { isOfUse($0, at: now) }) {
            let others = connections.contains(where: \.hasAnswered)
            for delivery in queue.takeAll() {
                end(delivery, delivery.endInPause(pause, host: server.host, isAlone: others))
            }
            return nil
        }
        if inFlight >= limits.inFlight { return nil }
        if let place = connections.firstIndex(where: { $0.hasRoom(at: now) }),
            let delivery = queue.next(unsent: connections[place].isOnTrial)
        {
            return .open(connection: connections[place].number, delivery)
        }
        return isAllowed && mayConnect(at: now) ? connect(at: now) : nil
    }

    private func isOfUse(_ connection: ConnectionState, at now: ContinuousClock.Instant) -> Bool {
        connection.phase == .connecting || (connection.phase == .open && !connection.isResting(at: now))
    }

    /// Whether all connections are draining: then another one is opened before their requests end.
    private func needsReplacement(at now: ContinuousClock.Instant) -> Bool {
        connections.contains { $0.requests > 0 } && !connections.contains { $0.phase != .draining }
            && mayConnect(at: now)
    }

    /// One connection is opened at a time, and only if the others have no free stream, or if their first request is not answered soon. A slow line gets no
    /// second connection.
    private func mayConnect(at now: ContinuousClock.Instant) -> Bool {
        let working = connections.filter { $0.phase != .draining }
        return working.count(where: { !$0.isMute(at: now) }) < limits.connections
            && connections.count < limits.connections * Self.mostSockets
            && backoff.remaining(at: now) == nil
            && working.allSatisfy { $0.phase == .open && ($0.isFull || $0.isResting(at: now) || $0.isMute(at: now)) }
    }

    private mutating func connect(at now: ContinuousClock.Instant) -> Step {
        begun += 1
        backoff.begin()
        connections.append(ConnectionState(begun, window: window, at: now))
        return .connect(begun)
    }

    // MARK: - Requests

    /// The request's stream is open.
    mutating func began(_ delivery: Delivery, on stream: Int32, of number: Int, at now: ContinuousClock.Instant) {
        update(number) { $0.began(delivery, on: stream, at: now) }
    }

    /// The stream could not be opened: the connection takes no more requests.
    mutating func couldNotBegin(_ delivery: Delivery, on number: Int, at now: ContinuousClock.Instant) {
        drain(number)
        giveBack(delivery)
        closeIfDone(number, at: now)
    }

    mutating func end(_ delivery: Delivery, _ end: PushOutcome.End) {
        actions.append(.end(delivery.outcome(end)))
    }

    /// - Parameter isFirst: Whether it goes before those that wait.
    mutating func giveBack(_ delivery: Delivery, first isFirst: Bool = true) {
        guard delivery.mayGo, !isStopping else { return end(delivery, delivery.endUnsent) }
        if isFirst { queue.giveBack(delivery) } else { queue.append(delivery) }
    }

    mutating func take(_ ending: ConnectionState.Ending?, of number: Int, at now: ContinuousClock.Instant) {
        switch ending {
        case .refused(let delivery)?:
            if delivery.sends == 0 { actions.append(.didNotSend(slot: delivery.request.slot)) }
            if let end = delivery.endRefused { self.end(delivery, end) } else { giveBack(delivery) }
        case .turn(var delivery, let turn)?:
            switch delivery.step(after: turn, renew: renew) {
            case .ends(let end): self.end(delivery, end)
            case .again(let isUnfit):
                if isUnfit { drain(number) }
                // Not the first on the next connection, too: a request that never gets a response would keep all others waiting.
                if case .failure = turn { giveBack(delivery, first: false) } else { giveBack(delivery) }
            }
        case nil: break
        }
    }

    // MARK: - Connections

    /// The connection is open, and the server speaks HTTP/2.
    mutating func connected(_ number: Int, at now: ContinuousClock.Instant) {
        opened += 1
        update(number) { $0.opened(at: now) }
    }

    /// The connection is no longer needed, and no attempt was made.
    mutating func didNotConnect(_ number: Int) {
        connections.removeAll { $0.number == number }
    }

    /// The connection could not be made. If another one works, the requests wait for that one.
    mutating func couldNotConnect(
        _ number: Int, _ kind: PushFailure.Kind, _ message: String, at now: ContinuousClock.Instant
    ) {
        connections.removeAll { $0.number == number }
        backoff.failed(number, at: now)
        if connections.contains(where: { $0.phase == .open && $0.hasAnswered }) { return }
        endNext { $0.failed(kind, message) }
    }

    mutating func heard(_ number: Int, at now: ContinuousClock.Instant) {
        update(number) { $0.quiet.heard(at: now) }
    }

    /// - Parameter time: The time of day before the bytes were written.
    mutating func wrote(
        _ number: Int, ends: [Int32], isPending: Bool, hasMoved: Bool, at now: ContinuousClock.Instant, _ time: Instant
    ) {
        update(number) { connection in
            for stream in ends { connection.wrote(stream, at: now, time) }
            connection.quiet.wrote(isPending: isPending, hasMoved: hasMoved, at: now)
        }
    }

    mutating func take(_ event: SessionEvent, of number: Int, at now: ContinuousClock.Instant, _ time: Instant) {
        guard let place = place(of: number) else { return }
        var ending: ConnectionState.Ending?
        switch event {
        case .settings(let most): connections[place].settings(mostStreams: most)
        case .head(let stream, let answer):
            ending = connections[place].head(answer, on: stream, at: now, time)
            answered(at: place)
        case .answer(let stream, let answer):
            ending = connections[place].answer(answer, on: stream, at: now, time)
            answered(at: place)
            if connections[place].isOfNoUse { drain(number) }
            if !connections[place].isWhole(stream) { actions.append(.reset(connection: number, stream: stream)) }
        case .closed(let stream, let code):
            let wasResting = connections[place].isResting(at: now)
            ending = connections[place].closed(stream, code: code, at: now)
            if !wasResting, connections[place].isResting(at: now) { backoff.wasFruitless(number, at: now) }
        case .goAway(let last, let goAway):
            drain(number)
            connections[place].takes(goAway, last: last)
            if goAway.blamesSender { fault = PushFault(goAway, count: (fault?.count ?? 0) + 1) }
        }
        take(ending, of: number, at: now)
        closeIfDone(number, at: now)
    }

    /// No connection takes more requests: others follow.
    mutating func replaceAll(at now: ContinuousClock.Instant) {
        for number in connections.filter({ $0.phase == .open }).map(\.number) {
            drain(number)
            closeIfDone(number, at: now)
        }
    }

    /// A connection takes no more requests.
    mutating func drain(_ number: Int) {
        guard let place = place(of: number) else { return }
        if connections[place].phase == .open, connections[place].hasAnswered {
            backoff.earn(atMost: limits.connections)
        }
        // It may come again: the next ones begin where this one was.
        if connections[place].phase == .open { window = max(window, connections[place].window) }
        connections[place].drain()
    }

    private mutating func answered(at place: Int) {
        if connections[place].goAway == nil { fault?.isCurrent = false }
        backoff.answered(connections[place].number)
    }

    /// The connection was lost. Its unfinished requests are sent again if they have sends left.
    mutating func lost(
        _ number: Int, _ kind: PushFailure.Kind, _ message: String, at now: ContinuousClock.Instant
    ) {
        drain(number)
        guard let place = place(of: number) else { return }
        if connections[place].unanswered > 1 { window = connections[place].windowAfterLoss }
        let endings = connections[place].lost(kind, message)
        let gone = connections.remove(at: place)
        let isAsIfNotMade = !gone.hasSpoken && !endings.isEmpty
        if !gone.hasAnswered, !isAsIfNotMade { backoff.wasFruitless(number, at: now) }
        for ending in endings { take(ending, of: number, at: now) }
        if isAsIfNotMade {
            let kind = kind == .connectionLost ? PushFailure.Kind.connect : kind
            couldNotConnect(
                number, kind, "the server has closed the connection before it spoke HTTP/2: \(message)", at: now)
        }
    }

    private mutating func closeIfDone(_ number: Int, at now: ContinuousClock.Instant) {
        guard let place = place(of: number), connections[place].isDone else { return }
        if !connections.remove(at: place).hasAnswered { backoff.wasFruitless(number, at: now) }
        actions.append(.close(connection: number, why: "its work is done"))
    }

    /// Closes a connection before its work is done.
    ///
    /// - Parameter why: One line for the trace, and for requests that cannot be sent again.
    mutating func close(_ number: Int, _ why: String, at now: ContinuousClock.Instant) {
        lost(number, .connectionLost, why, at: now)
        actions.append(.close(connection: number, why: why))
    }

    /// The index in `connections`; nil if the pool no longer has the connection.
    func place(of number: Int) -> Int? {
        connections.firstIndex { $0.number == number }
    }

    mutating func update(_ number: Int, _ change: (inout ConnectionState) -> Void) {
        guard let place = place(of: number) else { return }
        change(&connections[place])
    }
}
