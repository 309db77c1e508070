internal import CCurl
internal import TokenModel

/// The loop of a client's thread: performs what `ConnectionPool` decides, moves bytes, and tells the pool what happens.
final class PushLoop {
    /// A client's work for one environment's server.
    private final class Scope {
        var pool: ConnectionPool
        let authority: [UInt8]
        var links: [Int: Link] = [:]

        init(_ pool: ConnectionPool) {
            self.pool = pool
            authority = RequestHeaders.authority(of: pool.server)
        }
    }

    private let mailbox: PushMailbox
    private let multi: MultiHandle
    private let identity: @Sendable () throws -> PushIdentity
    private let options: PushClientOptions
    private let ended: @Sendable () -> Void
    private let trace: TraceSink?

    private let scopes: [Environment: Scope]
    private var headers = RequestHeaders()
    private var outcomes: [PushOutcome] = []
    private var now = ContinuousClock.now
    private var time = Instant.now
    private var stopBy: ContinuousClock.Instant?
    private var turns = 0
    private let buffer = ReadBuffer()

    init(
        _ mailbox: PushMailbox, _ multi: MultiHandle, _ identity: @escaping @Sendable () throws -> PushIdentity,
        _ options: PushClientOptions,
        ended: @escaping @Sendable () -> Void
    ) {
        self.mailbox = mailbox
        self.multi = multi
        self.identity = identity
        self.options = options
        self.ended = ended
        trace = options.trace.map(TraceSink.init)
        let limits = ConnectionPool.Limits(
            inFlight: max(1, options.inFlight), connections: max(1, options.connections),
            answerTimeout: options.answerTimeout, idleTimeout: options.idleTimeout)
        scopes = Dictionary(
            uniqueKeysWithValues: Environment.allCases.map { environment in
                let pool = ConnectionPool(options.server(of: environment), limits) {
                    (try? identity())?.renew?($0) ?? false
                }
                return (environment, Scope(pool))
            })
    }

    func run() {
        let tick = max(.milliseconds(10), min(.seconds(1), options.answerTimeout / 10))
        var checkedAt = now
        var judgesFrom = now
        while true {
            let turnBegan = now
            (now, time) = (.now, .now)
            let stoodStill = isBusy && now - turnBegan > options.standstill
            // What came meanwhile has not been read, and may take a while. So all requests in flight have more time.
            if now - turnBegan > tick * 3 { judgesFrom = now + min(now - turnBegan, options.answerTimeout) }
            takeOrders()
            if stoodStill { for scope in scopes.values { scope.pool.abandon(at: now) } }
            for scope in scopes.values { perform(scope) }
            connect()
            for scope in scopes.values {
                readAll(scope)
                work(scope)
            }
            if now - checkedAt >= tick {
                checkedAt = now
                for scope in scopes.values {
                    for link in scope.links.values { link.session.beginPeriod() }
                    if now >= judgesFrom { scope.pool.tick(at: now) }
                    work(scope)
                }
            }
            publish()
            if stopBy != nil, !isBusy { return closeAll() }
            wait(tick: tick)
        }
    }

    private var isBusy: Bool { scopes.values.contains { $0.pool.isBusy } }

    private func takeOrders() {
        let orders = mailbox.takeOrders()
        if !orders.withdrawn.isEmpty {
            for scope in scopes.values { scope.pool.withdraw(orders.withdrawn) }
        }
        for environment in orders.unwanted { scopes[environment]!.pool.replaceAll(at: now) }
        for request in orders.requests {
            let delivery = Delivery(request)
            if let fault = request.fault {
                outcomes.append(delivery.outcome(.unsendable(fault)))
            } else {
                scopes[request.address.environment]!.pool.add(delivery)
            }
        }
        stopBy = orders.stopBy
        guard let stopBy else { return }
        for scope in scopes.values {
            if now >= stopBy { scope.pool.endAll(at: now) } else { scope.pool.stop() }
        }
    }

    /// Begins what can be begun, and writes it, until nothing more can be.
    private func work(_ scope: Scope) {
        var goesOn = true
        while goesOn {
            goesOn = false
            perform(scope)
            while let step = scope.pool.next(at: now) {
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
            delivery.authorization = try identity().authorization?()
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
            identity = try self.identity()
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

    /// Goes on with connections that are not open yet.
    private func connect() {
        for (tls, code) in multi.connect() {
            for scope in scopes.values {
                guard let link = scope.links[tls.number], link.tls === tls else { continue }
                open(link, code, scope)
            }
        }
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

    private func closeAll() {
        for scope in scopes.values {
            for (number, link) in scope.links {
                if link.isOpen, !link.isPending {
                    link.session.leave()
                    _ = link.flush()
                }
                drop(number, "the client stops", scope)
            }
        }
    }

    // MARK: - Waiting

    private func wait(tick: Duration) {
        let links = scopes.values.flatMap { $0.links.values.filter(\.isOpen) }
        if links.contains(where: \.hasMore) { return }
        var sockets = links.map(\.poll)
        let until = scopes.values.compactMap { $0.pool.wakesAt(tick: tick, after: now) }.min()
        let pause = until.map { now.duration(to: $0) } ?? .seconds(60)
        multi.wait(for: &sockets, milliseconds: pause.wholeMilliseconds)
        for (link, socket) in zip(links, sockets) { link.polled(socket.revents) }
    }

    private func publish() {
        var state = PushClientState(opened: scopes.values.reduce(0) { $0 + $1.pool.opened })
        state.queued = scopes.values.reduce(0) { $0 + $1.pool.queued }
        for (environment, scope) in scopes {
            state[environment] = PushClientState.Server(
                inFlight: scope.pool.inFlight, connectionsOpen: scope.pool.sockets)
        }
        state.faults = scopes.compactMapValues(\.pool.fault)
        turns += 1
        state.turns = turns
        let haveEnded = !outcomes.isEmpty
        mailbox.put(&outcomes, state)
        if haveEnded { ended() }
    }
}
