internal import Dispatch
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Looks at all shards for the status page, and only while somebody looks at the page: with 64 shards and 64 daemons, each of which
/// looked every ten seconds, a shard would be asked six times a second.
final class ShardSurvey: Sendable {
    /// What the last look found.
    struct Found: Sendable {
        /// In the order of their numbers.
        var shards: [ShardStatus]
        var at: Instant
    }

    private struct State {
        var found: Found?
        var isLooking = false
        /// Not before this.
        var next: ContinuousClock.Instant?
    }

    private let map: ShardMap
    private let own: DatabaseAddress
    private let bell = Wakeup()
    private let state = Mutex(State())

    /// The page refreshes itself every 15 seconds.
    private static let pause: Duration = .seconds(10)

    init(_ map: ShardMap, own: DatabaseAddress) {
        self.map = map
        self.own = own
    }

    /// Called for each request of the page. Never waits: what this begins shows on the next one.
    ///
    /// - Returns: What was found last; nil if nothing was.
    func found(at now: ContinuousClock.Instant = .now) -> Found? {
        let (found, begins) = state.withLock { state in
            let begins = !state.isLooking && state.next.map { now >= $0 } ?? true
            if begins { state.isLooking = true }
            return (state.found, begins)
        }
        if begins { bell.ring() }
        return found
    }

    /// Runs until the process ends, which does not wait for it.
    func run() {
        while true {
            bell.wait(for: .seconds(3600))
            if state.withLock({ $0.isLooking }) { look() }
        }
    }

    private func look() {
        let began = ContinuousClock.now
        let answers = Mutex([Int: ShardStatus]())
        // As many at a time as there are cores: one that does not answer must not delay all others.
        DispatchQueue.concurrentPerform(iterations: map.count.number) { number in
            let status = ShardStatus(number, in: map, as: own)
            answers.withLock { $0[number] = status }
        }
        let shards = answers.withLock { $0.values.sorted { $0.number < $1.number } }
        state.withLock {
            $0 = State(found: Found(shards: shards, at: .now), next: began + Self.pause)
        }
    }
}
