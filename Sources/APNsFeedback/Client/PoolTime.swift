internal import TokenModel

/// What the pool decides when time has passed, when the client stops, and after a standstill.
extension ConnectionPool {
    /// Ends what takes too long. Call it now and then.
    mutating func tick(at now: ContinuousClock.Instant) {
        for connection in connections where connection.phase != .connecting {
            endOverdue(on: connection.number, at: now)
            listen(to: connection.number, at: now)
        }
        closeIdle(at: now)
    }

    private mutating func endOverdue(on number: Int, at now: ContinuousClock.Instant) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        let isDead = connections[place].hasNotAnswered(for: limits.answerTimeout, at: now)
        let isSlow = connections[place].cannotWrite(for: limits.answerTimeout, at: now)
        let wasResting = connections[place].isResting(at: now)
        let late = connections[place].overdue(after: limits.answerTimeout, at: now)
        if !wasResting, connections[place].isResting(at: now) { failed(at: now) }
        for (stream, ending) in late {
            actions.append(.reset(connection: number, stream: stream))
            take(ending, of: number, at: now)
        }
        if isDead {
            close(number, "no response on the connection within \(limits.answerTimeout)", at: now)
        } else if isSlow {
            close(number, "a request was not written within \(limits.answerTimeout)", at: now)
        }
    }

    private mutating func listen(to number: Int, at now: ContinuousClock.Instant) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        let isBusy = connections[place].requests > 0
        switch connections[place].quiet.step(
            isBusy: isBusy, patience: limits.answerTimeout, idle: limits.idleTimeout, at: now)
        {
        case .ping?: actions.append(.ping(connection: number))
        case .isDead?: close(number, "the connection is dead: nothing comes and nothing goes", at: now)
        case nil: break
        }
    }

    /// Connections that take no request, such as those of a server that allows no streams, are replaced after a while.
    private mutating func closeIdle(at now: ContinuousClock.Instant) {
        guard !queue.isEmpty, inFlight == 0, !connections.contains(where: { $0.phase == .connecting }) else {
            waitsSince = nil
            return
        }
        let since = waitsSince ?? now
        waitsSince = since
        guard now - since > limits.answerTimeout else { return }
        waitsSince = nil
        for connection in connections { close(connection.number, "the server takes no requests", at: now) }
        backoff.failed(at: now)
    }

    /// When a wait should end at the latest, if nothing happens; nil while nothing is going on.
    func wakesAt(tick: Duration, after now: ContinuousClock.Instant) -> ContinuousClock.Instant? {
        let isWaiting = isBusy || connections.contains { $0.phase == .connecting || $0.quiet.isWaiting }
        guard isWaiting else { return nil }
        guard !queue.isEmpty, let rested = connections.compactMap(\.restsUntil).filter({ $0 > now }).min() else {
            return now + tick
        }
        return min(now + tick, rested)
    }

    // MARK: - The end

    /// Begins nothing more. What was not sent ends at once.
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

    /// Ends everything. What a connection's output still holds must not leave: it was given back.
    mutating func endAll(at now: ContinuousClock.Instant) {
        stop()
        for connection in connections {
            guard let place = connections.firstIndex(where: { $0.number == connection.number }) else { continue }
            for delivery in connections[place].takeAll() { end(delivery, delivery.endAtStop) }
            if connection.quiet.isPending { close(connection.number, "the client stops", at: now) }
        }
    }

    /// After a standstill, another daemon may have taken over all requests of this client: begins nothing and repeats nothing.
    /// What a connection's output still holds must not leave either, so that connection is closed.
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

    private mutating func endUnwritten(on number: Int) {
        guard let place = connections.firstIndex(where: { $0.number == number }) else { return }
        for (stream, delivery) in connections[place].takeUnwritten() {
            actions.append(.reset(connection: number, stream: stream))
            end(delivery, delivery.endAtStop)
        }
    }
}
