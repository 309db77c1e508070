internal import TokenModel

/// What the pool decides when time has passed, when the client stops, and after a standstill.
extension ConnectionPool {
    /// Ends the next waiting request, if there is one.
    mutating func endNext(_ end: (Delivery) -> PushOutcome.End) {
        if let delivery = queue.next() { self.end(delivery, end(delivery)) }
    }

    /// Ends requests and connections that take too long. Call it regularly.
    mutating func tick(at now: ContinuousClock.Instant) {
        for connection in connections where connection.phase != .connecting {
            endOverdue(on: connection.number, at: now)
            listen(to: connection.number, at: now)
        }
        closeIdle(at: now)
    }

    private mutating func endOverdue(on number: Int, at now: ContinuousClock.Instant) {
        guard let place = place(of: number) else { return }
        let isDead = connections[place].hasNotAnswered(for: limits.answerTimeout, at: now)
        let isSlow = connections[place].cannotWrite(for: limits.answerTimeout, at: now)
        let wasResting = connections[place].isResting(at: now)
        let lingering = connections[place].lingering(after: limits.answerTimeout, at: now)
        let late = connections[place].overdue(after: limits.answerTimeout, at: now)
        if !wasResting, connections[place].isResting(at: now) { backoff.wasFruitless(number, at: now) }
        for (stream, ending) in late {
            actions.append(.reset(connection: number, stream: stream))
            take(ending, of: number, at: now)
        }
        actions += lingering.map { .reset(connection: number, stream: $0) }
        if self.place(of: number).map({ connections[$0].isOfNoUse }) == true { drain(number) }
        if isDead {
            close(number, "no response on the connection within \(limits.answerTimeout)", at: now)
        } else if isSlow {
            close(number, "a request was not written within \(limits.answerTimeout)", at: now)
        }
    }

    private mutating func listen(to number: Int, at now: ContinuousClock.Instant) {
        guard let place = place(of: number) else { return }
        let isBusy = connections[place].requests > 0
        switch connections[place].quiet.step(
            isBusy: isBusy, patience: limits.answerTimeout, idle: limits.idleTimeout, at: now)
        {
        case .ping?: actions.append(.ping(connection: number))
        case .isDead?: close(number, "the connection is dead: nothing comes and nothing goes", at: now)
        case nil: break
        }
    }

    /// Closes all connections if none has taken a request for a while, as when the server allows no streams.
    private mutating func closeIdle(at now: ContinuousClock.Instant) {
        guard !queue.isEmpty, inFlight == 0, !connections.isEmpty,
            !connections.contains(where: { $0.phase == .connecting })
        else {
            waitsSince = nil
            return
        }
        let since = waitsSince ?? now
        waitsSince = since
        guard now - since > limits.answerTimeout else { return }
        waitsSince = nil
        for connection in connections { close(connection.number, "the server takes no requests", at: now) }
        backoff.rest(at: now)
    }

    /// When a wait must end at the latest; nil if the pool waits for nothing.
    func wakesAt(tick: Duration, after now: ContinuousClock.Instant) -> ContinuousClock.Instant? {
        let isWaiting = isBusy || connections.contains { $0.phase == .connecting || $0.quiet.isWaiting }
        guard isWaiting else { return nil }
        guard !queue.isEmpty, let rested = connections.compactMap(\.restsUntil).filter({ $0 > now }).min() else {
            return now + tick
        }
        return min(now + tick, rested)
    }

    // MARK: - The end

    /// Begins no more requests. Requests that were not sent end at once.
    mutating func stop() {
        isStopping = true
        for delivery in queue.takeAll() { end(delivery, delivery.endAtStop) }
        for connection in connections {
            if connection.phase == .connecting {
                didNotConnect(connection.number)
                actions.append(.close(connection: connection.number, why: "the client stops"))
            } else if !connection.quiet.isPending {
                endUnwritten(on: connection.number)
            }
        }
    }

    /// Takes requests back. Those of which no server can have the whole end at once. The others are not repeated; what a connection's
    /// output holds may still leave.
    mutating func withdraw(_ slots: Set<Int>) {
        let isMeant = { (delivery: Delivery) in slots.contains(delivery.request.slot) }
        for delivery in queue.take(where: isMeant) { end(delivery, delivery.endAtStop) }
        for connection in connections {
            update(connection.number) { $0.repeatNoMore(where: isMeant) }
            if !connection.quiet.isPending { endUnwritten(on: connection.number, where: isMeant) }
        }
    }

    /// Takes back the requests that wait and were never sent.
    mutating func withdrawUnsent(_ slots: Set<Int>) {
        for delivery in queue.take(where: { $0.sends == 0 && slots.contains($0.request.slot) }) {
            end(delivery, delivery.endAtStop)
        }
    }

    /// Ends all requests. A connection with unwritten bytes is closed: they belong to requests that were given back, and must not leave.
    mutating func endAll(at now: ContinuousClock.Instant) {
        stop()
        for connection in connections {
            guard let place = place(of: connection.number) else { continue }
            for delivery in connections[place].takeAll() { end(delivery, delivery.endAtStop) }
            if connection.quiet.isPending { close(connection.number, "the client stops", at: now) }
        }
    }

    /// After a standstill, another daemon may have taken over all requests of this client. So the client sends none of them, and repeats
    /// none. A connection with unwritten bytes is closed, because they must not leave either.
    mutating func abandon(at now: ContinuousClock.Instant) {
        for connection in connections {
            update(connection.number) { $0.repeatNoMore() }
            if connection.quiet.isPending {
                close(connection.number, "the client stood still", at: now)
            } else {
                endUnwritten(on: connection.number)
            }
        }
        for delivery in queue.takeAll() { end(delivery, delivery.endAtStop) }
    }

    private mutating func endUnwritten(on number: Int, where isMeant: (Delivery) -> Bool = { _ in true }) {
        guard let place = place(of: number) else { return }
        for (stream, delivery) in connections[place].takeUnwritten(where: isMeant) {
            actions.append(.reset(connection: number, stream: stream))
            end(delivery, delivery.endAtStop)
        }
    }
}
