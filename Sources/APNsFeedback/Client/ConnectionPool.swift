internal import TokenModel

/// The connections to one server and the requests for it: decides which connection gets the next request, when another one opens,
/// when the server is left alone, and how each request ends. Pure: `PushLoop` performs the actions and tells what happens.
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
        case reset(connection: Int, stream: Int32)
        case ping(connection: Int)
        /// Close it. The pool has forgotten it.
        case close(connection: Int, why: String)
    }

    /// What to do next, for the requests that wait.
    enum Step {
        /// Connect, and tell when the connection is open or could not be made.
        case connect(Int)
        /// Open a stream, and tell its number.
        case open(connection: Int, Delivery)
    }

    let server: PushServer
    let limits: Limits
    let renew: (String) -> Bool
    var connections: [ConnectionState] = []
    var queue = RequestQueue()
    var backoff = ServerBackoff()
    /// Refusals and lost connections since the last answer.
    var fruitless = 0
    var isStopping = false
    /// Since when requests wait and nothing is on its way.
    var waitsSince: ContinuousClock.Instant?
    var actions: [Action] = []
    /// The number of connections that were ever open.
    private(set) var opened = 0
    private var begun = 0
    /// The last GOAWAY with an error or a text.
    private(set) var goAway: PushGoAway?

    /// After so many, the server is left alone for a while.
    static let mostFruitless = 3
    /// The most sockets, as a multiple of the connections that take requests: others end their work.
    static let mostSockets = 4

    /// - Parameter renew: Takes the provider token that was refused. Returns whether there is another one now.
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
    mutating func next(at now: ContinuousClock.Instant) -> Step? {
        if isStopping { return nil }
        guard !queue.isEmpty else { return needsReplacement(at: now) ? connect(at: now) : nil }
        if let pause = backoff.remaining(at: now), !connections.contains(where: { isOfUse($0, at: now) }) {
            for delivery in queue.takeAll() {
                end(delivery, delivery.endInPause(pause, host: server.host))
            }
            return nil
        }
        if inFlight >= limits.inFlight { return nil }
        if let place = connections.firstIndex(where: { $0.hasRoom(at: now) }), let delivery = queue.next() {
            return .open(connection: connections[place].number, delivery)
        }
        return mayConnect(at: now) ? connect(at: now) : nil
    }

    private func isOfUse(_ connection: ConnectionState, at now: ContinuousClock.Instant) -> Bool {
        connection.phase == .connecting || (connection.phase == .open && !connection.isResting(at: now))
    }

    /// A connection was told to go: another one is ready before its requests have ended.
    private func needsReplacement(at now: ContinuousClock.Instant) -> Bool {
        connections.contains { $0.requests > 0 } && !connections.contains { $0.phase != .draining }
            && mayConnect(at: now)
    }

    /// One connection at a time, and only if those there are have no stream left. A slow line gets no second one.
    private func mayConnect(at now: ContinuousClock.Instant) -> Bool {
        let working = connections.filter { $0.phase != .draining }
        return working.count < limits.connections && connections.count < limits.connections * Self.mostSockets
            && backoff.remaining(at: now) == nil
            && working.allSatisfy { $0.phase == .open && ($0.isFull || $0.isResting(at: now)) }
    }

    private mutating func connect(at now: ContinuousClock.Instant) -> Step {
        begun += 1
        connections.append(ConnectionState(begun, at: now))
        return .connect(begun)
    }

    // MARK: - Requests

    /// A request has its stream.
    mutating func began(_ delivery: Delivery, on stream: Int32, of number: Int, at now: ContinuousClock.Instant) {
        update(number) { $0.began(delivery, on: stream, at: now) }
    }

    /// The request could not be begun: its connection takes no more.
    mutating func couldNotBegin(_ delivery: Delivery, on number: Int, at now: ContinuousClock.Instant) {
        update(number) { $0.drain() }
        giveBack(delivery)
        closeIfDone(number, at: now)
    }

    mutating func end(_ delivery: Delivery, _ end: PushOutcome.End) {
        actions.append(.end(delivery.outcome(end)))
    }

    /// Ends the next request that waits, if there is one.
    mutating func endNext(_ end: (Delivery) -> PushOutcome.End) {
        if let delivery = queue.next() { self.end(delivery, end(delivery)) }
    }

    mutating func giveBack(_ delivery: Delivery) {
        if delivery.mayGo, !isStopping { queue.giveBack(delivery) } else { end(delivery, delivery.endUnsent) }
    }

    mutating func take(_ ending: ConnectionState.Ending?, of number: Int, at now: ContinuousClock.Instant) {
        switch ending {
        case .refused(let delivery)?: giveBack(delivery)
        case .turn(var delivery, let turn)?:
            switch delivery.step(after: turn, renew: renew) {
            case .ends(let end): self.end(delivery, end)
            case .again(let isUnfit):
                if isUnfit { update(number) { $0.drain() } }
                giveBack(delivery)
            }
        case nil: break
        }
    }

    // MARK: - Connections

    /// TLS is there, and HTTP/2 agreed on.
    mutating func connected(_ number: Int, at now: ContinuousClock.Instant) {
        opened += 1
        update(number) { $0.opened(at: now) }
    }

    /// The connection is not wanted any more, and was not tried.
    mutating func didNotConnect(_ number: Int) {
        connections.removeAll { $0.number == number }
    }

    /// No connection could be made. While another one works, its requests wait for that one.
    mutating func couldNotConnect(
        _ number: Int, _ kind: PushFailure.Kind, _ message: String, at now: ContinuousClock.Instant
    ) {
        connections.removeAll { $0.number == number }
        backoff.failed(at: now)
        if connections.contains(where: { $0.phase == .open && $0.hasAnswered }) { return }
        endNext { $0.failed(kind, message) }
    }

    mutating func heard(_ number: Int, at now: ContinuousClock.Instant) {
        update(number) { $0.quiet.heard(at: now) }
    }

    /// - Parameter time: The wall clock before the bytes were written.
    mutating func wrote(
        _ number: Int, ends: [Int32], isPending: Bool, hasMoved: Bool, at now: ContinuousClock.Instant, _ time: Instant
    ) {
        update(number) { connection in
            for stream in ends { connection.wrote(stream, at: now, time) }
            connection.quiet.wrote(isPending: isPending, hasMoved: hasMoved, at: now)
        }
    }

    mutating func take(_ event: SessionEvent, of number: Int, at now: ContinuousClock.Instant, _ time: Instant) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        var ending: ConnectionState.Ending?
        switch event {
        case .settings(let most): connections[place].settings(mostStreams: most)
        case .head(let stream, let answer):
            ending = connections[place].head(answer, on: stream, at: now, time)
            answered()
        case .answer(let stream, let answer):
            ending = connections[place].answer(answer, on: stream, at: now, time)
            answered()
            if !connections[place].isWhole(stream) { actions.append(.reset(connection: number, stream: stream)) }
        case .closed(let stream, let code):
            let wasResting = connections[place].isResting(at: now)
            ending = connections[place].closed(stream, code: code, at: now)
            if !wasResting, connections[place].isResting(at: now) { failed(at: now) }
        case .goAway(let last, let goAway):
            connections[place].takes(goAway, last: last)
            self.goAway = connections[place].goAway
        }
        take(ending, of: number, at: now)
        closeIfDone(number, at: now)
    }

    private mutating func answered() {
        fruitless = 0
        backoff.answered()
    }

    /// The server refused, or hung up without an answer. A few times another connection may help.
    mutating func failed(at now: ContinuousClock.Instant) {
        fruitless += 1
        if fruitless >= Self.mostFruitless { backoff.failed(at: now) }
    }

    /// The connection is gone. What was on it and is not settled goes again, as often as it may.
    mutating func lost(
        _ number: Int, _ kind: PushFailure.Kind, _ message: String, at now: ContinuousClock.Instant
    ) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        let endings = connections[place].lost(kind, message)
        let gone = connections.remove(at: place)
        if !gone.hasAnswered { failed(at: now) }
        for ending in endings { take(ending, of: number, at: now) }
    }

    private mutating func closeIfDone(_ number: Int, at now: ContinuousClock.Instant) {
        guard let connection = connections.first(where: { $0.number == number }), connection.isDone else { return }
        connections.removeAll { $0.number == number }
        if !connection.hasAnswered { failed(at: now) }
        actions.append(.close(connection: number, why: "its work is done"))
    }

    /// Gives a connection up.
    mutating func close(_ number: Int, _ why: String, at now: ContinuousClock.Instant) {
        lost(number, .connectionLost, why, at: now)
        actions.append(.close(connection: number, why: why))
    }

    mutating func update(_ number: Int, _ change: (inout ConnectionState) -> Void) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        change(&connections[place])
    }
}
