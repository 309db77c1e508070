internal import CCurl
internal import TokenModel

/// What a thread does for one client: performs what `ConnectionPool` decides, moves bytes, and tells the pool what happens.
final class PushWork {
    /// A client's work for one environment's server.
    private final class Scope {
        let environment: Environment
        var pool: ConnectionPool
        let authority: [UInt8]
        var links: [Int: Link] = [:]

        init(_ environment: Environment, _ pool: ConnectionPool) {
            self.environment = environment
            self.pool = pool
            authority = RequestHeaders.authority(of: pool.server)
        }
    }

    private let client: PushClient
    private let multi: MultiHandle
    private let trace: TraceSink?
    private let scopes: [Scope]
    private var headers = RequestHeaders()
    private var outcomes: [PushOutcome] = []
    private var now = ContinuousClock.now
    private var time = Instant.now
    private var stopBy: ContinuousClock.Instant?
    private var turns = 0
    /// Whether a socket is ready, or a connection has opened.
    private(set) var hasNews = false
    private let buffer: ReadBuffer

    /// - Parameters:
    ///   - multi: Opens the connections.
    ///   - buffer: The thread's.
    init(_ client: PushClient, _ multi: MultiHandle, _ buffer: ReadBuffer) {
        self.client = client
        self.multi = multi
        self.buffer = buffer
        let options = client.options
        trace = options.trace.map(TraceSink.init)
        let limits = ConnectionPool.Limits(
            inFlight: max(1, options.inFlight), connections: max(1, options.connections),
            answerTimeout: options.answerTimeout, idleTimeout: options.idleTimeout)
        scopes = Environment.allCases.map { environment in
            let pool = ConnectionPool(options.server(of: environment), limits) { refused in
                (try? client.identity())?.renew?(refused) ?? false
            }
            return Scope(environment, pool)
        }
    }

    var options: PushClientOptions { client.options }
    var isBusy: Bool { scopes.contains { $0.pool.isBusy } }
    /// Whether the client has stopped, and nothing is left to do.
    private(set) var isOver = false

    private func scope(of environment: Environment) -> Scope { scopes.first { $0.environment == environment }! }

    /// Does what can be done without waiting.
    ///
    /// - Parameters:
    ///   - time: The time of day at `now`.
    ///   - stoodStill: Whether the thread has stood still for so long that another daemon may have taken over the requests.
    ///   - isTick: Whether time has passed. Without it, a client without orders, requests and news has nothing to do.
    ///   - judges: Whether requests may have taken too long by now.
    func turn(
        at now: ContinuousClock.Instant, _ time: Instant, stoodStill: Bool, isTick: Bool, judges: Bool
    ) {
        (self.now, self.time) = (now, time)
        let hasOrders = takeOrders()
        guard hasOrders || isTick || isBusy || stopBy != nil || hasNews else { return }
        for scope in scopes {
            if stoodStill { scope.pool.abandon(at: now) }
            perform(scope)
            readAll(scope)
            work(scope)
            guard isTick else { continue }
            for link in scope.links.values { link.session.beginPeriod() }
            if judges { scope.pool.tick(at: now) }
            work(scope)
        }
        publish()
        hasNews = scopes.contains { $0.links.values.contains(where: \.hasMore) }
        if stopBy != nil, !isBusy { close() }
    }

    /// - Returns: Whether there were any.
    private func takeOrders() -> Bool {
        let orders = client.mailbox.takeOrders()
        if orders.isEmpty { return false }
        if !orders.withdrawn.isEmpty {
            for scope in scopes { scope.pool.withdraw(orders.withdrawn) }
        }
        if !orders.withdrawnUnsent.isEmpty {
            for scope in scopes { scope.pool.withdrawUnsent(orders.withdrawnUnsent) }
        }
        for environment in orders.unwanted { scope(of: environment).pool.replaceAll(at: now) }
        for request in orders.requests {
            let delivery = Delivery(request)
            if let fault = request.fault {
                outcomes.append(delivery.outcome(.unsendable(fault)))
            } else {
                scope(of: request.address.environment).pool.add(delivery)
            }
        }
        stopBy = orders.stopBy
        guard let stopBy else { return true }
        for scope in scopes {
            if now >= stopBy { scope.pool.endAll(at: now) } else { scope.pool.stop() }
        }
        return true
    }

    /// Begins what can be begun, and writes it, until nothing more can be.
    private func work(_ scope: Scope) {
        var goesOn = true
        while goesOn {
            goesOn = false
            perform(scope)
            while let step = scope.pool.next(at: now, mayConnect: multi.hasRoom(for: scope.pool.server)) {
                goesOn = true
                switch step {
                case .connect(let number): connect(number, scope)
                case .open(let number, let delivery): begin(delivery, on: number, scope)
                }
            }
            perform(scope)
            for (number, link) in scope.links where link.isOpen && flush(link, number, scope) { goesOn = true }
        }
        perform(scope)
    }

    /// Performs what the pool has decided.
    private func perform(_ scope: Scope) {
        for action in scope.pool.takeActions() {
            switch action {
            case .end(let outcome): outcomes.append(outcome)
            case .didNotSend(let slot): options.observer?.didNotSend(slot)
            case .reset(let connection, let stream): scope.links[connection]?.session.reset(stream)
            case .ping(let connection): scope.links[connection]?.session.ping()
            case .close(let connection, let why): drop(connection, why, scope)
            }
        }
    }

    // MARK: - Requests

    private func begin(_ delivery: Delivery, on number: Int, _ scope: Scope) {
        var delivery = delivery
        do {
            delivery.authorization = try client.identity().authorization?()
        } catch {
            return scope.pool.end(delivery, delivery.failed(.identity, "\(error)"))
        }
        guard let link = scope.links[number] else { return scope.pool.couldNotBegin(delivery, on: number, at: now) }
        headers.write(
            delivery.request, authority: scope.authority, authorization: delivery.authorization,
            indexed: &link.indexed)
        guard
            let stream = link.session.open(
                headers, payload: delivery.request.payload, slot: delivery.request.slot)
        else {
            return scope.pool.couldNotBegin(delivery, on: number, at: now)
        }
        scope.pool.began(delivery, on: stream, of: number, at: now)
    }

    // MARK: - Connections

    private func connect(_ number: Int, _ scope: Scope) {
        let identity: PushIdentity
        do {
            identity = try client.identity()
            _ = try identity.authorization?()
        } catch {
            scope.pool.didNotConnect(number)
            return scope.pool.endNext { $0.failed(.identity, "\(error)") }
        }
        let tls: TLSConnection
        do {
            tls = try TLSConnection(
                number, to: scope.pool.server, identity: identity, options: options, trace: trace)
        } catch { return scope.pool.couldNotConnect(number, .other, error.message, at: now) }
        if let message = multi.add(tls) { return scope.pool.couldNotConnect(number, .other, message, at: now) }
        scope.links[number] = Link(tls, options.observer)
    }

    /// A connection has opened or failed.
    ///
    /// - Returns: Whether it is this client's.
    func take(_ tls: TLSConnection, _ code: CURLcode, at now: ContinuousClock.Instant) -> Bool {
        guard let scope = scopes.first(where: { $0.links[tls.number]?.tls === tls }) else { return false }
        self.now = now
        hasNews = true
        open(scope.links[tls.number]!, code, scope)
        return true
    }

    private func open(_ link: Link, _ code: CURLcode, _ scope: Scope) {
        let number = link.tls.number
        do throws(Link.Lost) {
            guard code == CURLE_OK else {
                let message = link.tls.refusal(code)
                throw Link.Lost(kind: PushFailure.Kind(code, message), message: message)
            }
            try link.open(buffer, host: scope.pool.server.host)
        } catch {
            drop(number, error.message, scope)
            return scope.pool.couldNotConnect(number, error.kind, error.message, at: now)
        }
        scope.pool.connected(number, at: now)
        takeEvents(link, number, scope)
    }

    private func readAll(_ scope: Scope) {
        for (number, link) in scope.links where link.hasMore {
            do throws(Link.Lost) {
                if try link.read(buffer) { scope.pool.heard(number, at: now) }
                takeEvents(link, number, scope)
            } catch {
                takeEvents(link, number, scope)
                lose(number, error, scope)
            }
        }
    }

    /// - Returns: Whether that changed anything for other requests.
    private func flush(_ link: Link, _ number: Int, _ scope: Scope) -> Bool {
        let written = link.flush()
        // First what has left, then what it led to.
        scope.pool.wrote(
            number, ends: written.ends, isPending: link.isPending, hasMoved: written.hasMoved, at: now, time)
        let hasNews = takeEvents(link, number, scope)
        if let lost = written.lost { lose(number, lost, scope) }
        return hasNews || written.lost != nil
    }

    @discardableResult private func takeEvents(_ link: Link, _ number: Int, _ scope: Scope) -> Bool {
        let events = link.session.takeEvents()
        for event in events {
            if case .goAway(let last, let goAway) = event {
                trace?.say("connection \(number): \(goAway.message), last stream \(last)")
            }
            scope.pool.take(event, of: number, at: now, time)
        }
        return !events.isEmpty
    }

    private func lose(_ number: Int, _ error: Link.Lost, _ scope: Scope) {
        drop(number, error.message, scope)
        scope.pool.lost(number, error.kind, error.message, at: now)
    }

    private func drop(_ number: Int, _ why: String, _ scope: Scope) {
        guard let link = scope.links.removeValue(forKey: number) else { return }
        trace?.say("connection \(number) closed: \(why)")
        multi.remove(link.tls)
    }

    private func close() {
        for scope in scopes {
            for (number, link) in scope.links {
                if link.isOpen, !link.isPending {
                    link.session.leave()
                    _ = link.flush()
                }
                drop(number, "the client stops", scope)
            }
        }
        isOver = true
        client.mailbox.close()
        client.ended()
    }

    // MARK: - Waiting

    /// The connections to wait for.
    var links: [Link] { scopes.flatMap { $0.links.values.filter(\.isOpen) } }

    /// - Parameter events: Those that ended the wait, in the order of `links`.
    func polled(_ links: [Link], _ events: ArraySlice<curl_waitfd>) {
        for (link, socket) in zip(links, events) where socket.revents != 0 {
            hasNews = true
            link.polled(socket.revents)
        }
    }

    /// When a wait must end at the latest; nil if the client waits for nothing.
    func wakesAt(tick: Duration) -> ContinuousClock.Instant? {
        scopes.compactMap { $0.pool.wakesAt(tick: tick, after: now) }.min()
    }

    private func publish() {
        var state = PushClientState(opened: scopes.reduce(0) { $0 + $1.pool.opened })
        state.queued = scopes.reduce(0) { $0 + $1.pool.queued }
        for scope in scopes {
            state[scope.environment] = PushClientState.Server(
                inFlight: scope.pool.inFlight, connectionsOpen: scope.pool.sockets)
            state.faults[scope.environment] = scope.pool.fault
        }
        turns += 1
        state.turns = turns
        let haveEnded = !outcomes.isEmpty
        client.mailbox.put(&outcomes, state)
        if haveEnded { client.ended() }
    }
}
