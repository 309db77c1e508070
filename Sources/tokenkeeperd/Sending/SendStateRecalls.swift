internal import TokenLedger
internal import TokenModel

/// What must not be sent any more, what goes next, and what is written.
extension SendState {
    /// The requests to look up now, before `handOver` and `release`.
    ///
    /// - Returns: Those that are sent next and were not looked up a moment before. Every quarter of a second, also what the clients have,
    ///   and one of those that wait for their instant from each topic and campaign.
    mutating func toLookUp(at now: ContinuousClock.Instant) -> [Int64] {
        // What waited behind another request may have waited for a minute.
        var numbers = Set(next).union(paced.toLookUp(at: now))
        if recalls.isDue(at: now) {
            numbers.formUnion(recalls.begin(with: submitted, and: paced.numbers, at: now))
            numbers.formUnion(paced.probes)
        }
        return Array(numbers)
    }

    /// The requests behind one that has ended.
    private var next: [Int64] { servers.values.flatMap(\.requests.next) }

    /// The `request_id` of every request that was submitted and has not ended, and of those that wait behind one.
    private var submitted: Set<Int64> { servers.values.reduce(into: []) { $0.formUnion($1.requests.numbers) } }

    /// The `request_id` of every claimed request that has not ended.
    private var held: Set<Int64> { submitted.union(paced.numbers) }

    /// Takes what has changed for requests since they were claimed.
    ///
    /// - Parameters:
    ///   - asked: The requests that were looked up.
    ///   - now: After the look-up.
    mutating func take(
        _ recalled: Outbox.Recalled, among asked: [Int64], at now: ContinuousClock.Instant
    ) -> [Action] {
        paced.lookedUp(Set(asked), paused: recalled.paused, at: now)
        if recalled.isEmpty { return [] }
        paced.withdraw(recalled.gone)
        unwritten.giveBack(paced.withdraw(recalled.paused), after: nil)
        // Array: what iterates over the dictionary itself would have it copied.
        for scope in Array(servers.keys) {
            servers[scope]?.requests.withdraw { recalled.gone.contains($0.number) }
            giveBack(in: scope) { recalled.paused.contains($0.number) }
        }
        return withdraw { recalled.gone.contains($0.number) || recalled.paused.contains($0.number) }
    }

    /// Takes requests back from the clients. They end with the outcome that follows.
    func withdraw(where isMeant: (ClaimedRequest) -> Bool) -> [Action] {
        servers.compactMap { scope, server in
            let numbers = server.requests.inFlight(where: isMeant)
            return numbers.isEmpty ? nil : .withdraw(numbers, credential: scope.credential)
        }
    }

    /// Gives back unsent requests at once, as if they had not been tried.
    mutating func giveBack(in scope: CredentialScope, where isMeant: (ClaimedRequest) -> Bool) {
        unwritten.giveBack(servers[scope]?.requests.withdraw(where: isMeant) ?? [], after: nil)
    }

    /// Lets the next request go of each token whose last one has ended.
    mutating func handOver() -> [Action] {
        Array(servers.keys).compactMap { scope in
            let next = servers[scope]?.requests.handOver() ?? []
            return next.isEmpty ? nil : .submit(next, credential: scope.credential)
        }
    }

    // MARK: - Rates

    /// Lets the requests go whose instant has come, as far as there is room and as far as `toLookUp` does not want them first.
    mutating func release(at now: Moment) -> [Action] {
        var actions: [Action] = []
        for (source, scope) in paced.sources {
            if isOnTrial(source.topic) {
                unwritten.giveBack(paced.withdraw { $0.request.address.scope == source.topic }, after: nil)
                continue
            }
            let released = paced.release(source, at: now.clock, most: room(in: scope))
            // The database decides whether a request has expired, and ends it when it is claimed again.
            unwritten.giveBack(
                released.late + released.due.filter { $0.request.hasExpired(at: now.timeOfDay) }, after: nil)
            let sendable = released.due.filter { !$0.request.hasExpired(at: now.timeOfDay) }
            actions += submit(sendable, in: scope, at: now.clock)
        }
        return actions
    }

    /// Gives back what waits for its instant: the daemon shuts down.
    mutating func giveBackPaced() {
        unwritten.giveBack(paced.withdraw { _ in true }, after: nil)
    }

    // MARK: - Writing

    /// What to write to the database next; nil when everything is written. Call `wrote` after the COMMIT.
    var nextWrite: [RequestEnding]? { unwritten.next }

    /// What `nextWrite` returned is in the database, except the endings with these numbers: another session has locked their requests.
    mutating func wrote(except locked: Set<Int64> = [], at now: ContinuousClock.Instant = .now) {
        unwritten.wrote(except: locked, at: now)
        if isEmpty { campaigns.mayHaveEnded() }
    }

    /// Lets `nextWrite` return again what was locked, if it is time.
    mutating func retryLocked(at now: ContinuousClock.Instant) { unwritten.retryLocked(at: now) }

    /// Compares the state with what this daemon has claimed according to the database. A COMMIT whose response was lost may have
    /// claimed or finished requests, and another daemon may have taken some over.
    mutating func reconcile(claimed: Set<Int64>) -> [Action] {
        unwritten.giveBack(numbers: claimed.subtracting(held).subtracting(unwritten.numbers))
        paced.withdraw { !claimed.contains($0.number) }
        for scope in Array(servers.keys) { servers[scope]?.requests.withdraw { !claimed.contains($0.number) } }
        return withdraw { !claimed.contains($0.number) }
    }
}
